"""Context parallelism: hooks see whole sequences, and whole gradients of them, as on one device.

Shapes: B samples, S positions, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import mine, write_manifest
from torch import Tensor, nn

import composer3d
from composer3d.propagation import PropagationError
from composer3d.testing import run_ranks

TIGHT = 1e-12
VOCAB, D, HEADS = 13, 8, 2
CP = "mesh.cp = 2\n[sharding.context_parallel]\n"
FSDP = f"{CP}[sharding.fsdp2]\n"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(D), Attention(), nn.Sequential(nn.Linear(D, D), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, hook: Callable[[Tensor], Any] | None = None, *, of: str = "activation") -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(16, D)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(D, VOCAB)
        self.hook, self.of = hook, of

    def forward(self, idx: Tensor) -> Tensor:
        x, p = self.tokens(idx), self.positions(torch.arange(idx.shape[1]))
        if self.of == "positions" and self.hook is not None and p.requires_grad:
            p.register_hook(self.hook)
        x = x + p
        if self.of == "activation" and self.hook is not None and x.requires_grad:
            x.register_hook(self.hook)
        if self.of == "kept" and x.requires_grad:
            w = x.detach().square().mean(-1, keepdim=True)
            x.register_hook(lambda g: g * w / w.sum(1, keepdim=True))
        for block in self.blocks:
            x = block(x)
        if self.of == "mean" and self.hook is not None and x.requires_grad:
            mean = x.mean(1)
            mean.register_hook(self.hook)
            x = x + mean[:, None]
        return self.head(x)


def written(g: Tensor) -> None:
    g.sub_(g.mean(1, keepdim=True))


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "sum of those before": lambda g: g.cumsum(1),
    "mean": lambda g: g - g.mean(1, keepdim=True),
    "norm of a sample": lambda g: g / (g.norm(dim=(1, 2), keepdim=True) + 1e-3),
    "numbers of positions": lambda g: g * torch.arange(g.shape[1])[None, :, None],
    "another": lambda g: torch.arange(g.numel(), dtype=g.dtype).view(g.shape) * 1e-5,
    "written into": written,
    "clamped": lambda g: g.clamp(-1e-3, 1e-3),
}


def without_mean(module: nn.Module, given: Any, _: Any) -> Any:
    return (given[0] - given[0].mean(1, keepdim=True),)


def by_position(module: nn.Module, given: Any) -> Any:
    return (given[0] * torch.arange(given[0].shape[1])[None, :, None],)


def registered(fqn: str, *, before: bool = False) -> Model:
    model = Model()
    module = model.get_submodule(fqn)
    if before:
        module.register_full_backward_pre_hook(by_position)
    else:
        module.register_full_backward_hook(without_mean)
    return model


CASES: dict[str, Callable[[], Model]] = {
    **{name: lambda hook=hook: Model(hook) for name, hook in HOOKS.items()},
    "a tensor of the forward": lambda: Model(of="kept"),
    "what every rank has": lambda: Model(lambda g: g.clamp(-1e-4, 1e-4), of="mean"),
    "norm of what every rank has": lambda: Model(lambda g: g / (g.norm() + 1e-3), of="positions"),
    "block": lambda: registered("blocks.1"),
    "inside of a block": lambda: registered("blocks.0.attention"),
    "before a block": lambda: registered("blocks.0", before=True),
    "before the inside of a block": lambda: registered("blocks.1.mlp", before=True),
    "head": lambda: registered("head"),
}
# Of what depends on no other samples of a batch, and on no other positions in the model's own forward.
BY_SAMPLE = [name for name in CASES if name not in ("another", "norm of what every rank has")]
UNPADDED = "what every rank has"


def loss_of(o: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum"), torch.tensor(t.numel())


def errors(names: list[str], text: str, length: int) -> list[float]:
    """Return how far gradients are from one device's, of the largest."""
    torch.set_default_dtype(torch.float64)
    generator, found = torch.Generator().manual_seed(1), []
    x, y = (torch.randint(0, VOCAB, (4, length), generator=generator) for _ in range(2))
    for name in names:
        torch.manual_seed(0)
        reference = CASES[name]()
        total, count = loss_of(reference(x), y)
        (total / count).backward()
        torch.manual_seed(0)
        run = composer3d.compose(CASES[name](), write_manifest(text), loss_fn=loss_of, example=((x,), {}))
        with run.step(0):
            run.forward_backward(mine(run, x), target=mine(run, y))
            own = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters() if p.grad is not None}
        run.close()
        wanted = {fqn: p.grad for fqn, p in reference.named_parameters()}
        top = max(float(each.abs().max()) for each in wanted.values())
        found.append(max(float((own[fqn] - wanted[fqn]).abs().max()) / top for fqn in own))
    return found


def assert_one_devices(world_size: int, names: list[str], text: str, *, length: int = 8) -> None:
    for found in run_ranks(errors, world_size, names, text, length):
        assert max(found) < TIGHT, dict(zip(names, found, strict=True))


def test_backward_hooks_relate_positions_as_on_one_device():
    assert_one_devices(2, list(CASES), FSDP)


def test_they_do_where_nobody_else_averages():
    assert_one_devices(2, ["norm of a sample", "mean", "block", "inside of a block", UNPADDED], CP)


def test_they_see_no_padding():
    assert_one_devices(2, [name for name in CASES if name != UNPADDED], FSDP, length=7)


def test_they_do_in_blocks_that_are_recomputed():
    names = ["sum of those before", "a tensor of the forward", "block", "inside of a block", "before a block"]
    assert_one_devices(2, names, f"{FSDP}[scheduling.activation_checkpoint]\nmode = 'full'\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [
        pytest.param(f"mesh.pp = 2\ntrain.microbatch = 1\n{FSDP}[scheduling.pipeline]\n", id="stages"),
        pytest.param(f"mesh.tp = 2\n{FSDP}[sharding.tensor_parallel]\n", id="tensor-parallel"),
    ],
)
def test_they_do_beside_other_plugins(tables: str):
    assert_one_devices(4, BY_SAMPLE, tables)


def misshapen() -> str:
    torch.set_default_dtype(torch.float64)
    x = torch.zeros(2, 8, dtype=torch.int64)
    run = composer3d.compose(Model(lambda g: g[:, :2]), write_manifest(FSDP), loss_fn=loss_of, example=((x,), {}))
    try:
        with run.step(0):
            run.forward_backward(mine(run, x), target=mine(run, x))
    except PropagationError as error:
        return str(error)
    finally:
        run.close()
    return ""


def test_gradients_of_another_size_are_refused():
    for text in run_ranks(misshapen, 2):
        assert text.startswith("the hook <lambda> (test_context_parallel_hooks.py:")
        assert "returns [2, 2, 8] in place of a gradient of [2, 8, 8]; return one of its size" in text


def kept_by_hooks(keeps: str) -> tuple[float, float]:
    """Return how far a loop's loss and gradients are, of what its forward hook keeps of a block."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCAB, (4, 8), generator=generator) for _ in range(2))

    def loss(model: Model) -> Tensor:
        kept: list[Tensor] = []
        handle = model.get_submodule(keeps).register_forward_hook(lambda module, given, output: kept.append(output))
        o = model(x)
        handle.remove()
        extra = kept[0].mean(1).square().sum(-1).mean() + kept[0][:, -1].square().mean() * kept[0].shape[1]
        return F.cross_entropy(o.flatten(0, 1), y.flatten()) + extra

    torch.manual_seed(0)
    reference = Model()
    wanted = loss(reference)
    wanted.backward()
    torch.manual_seed(0)
    run = composer3d.compose(Model(), write_manifest(FSDP), loss_fn=loss_of, example=((x,), {}))
    with run.step(0):
        value = run.backward(loss(run.model))
        own = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters()}
    run.close()
    off = max(float((own[fqn] - p.grad).abs().max()) for fqn, p in reference.named_parameters())
    return abs(float(value - wanted.detach())), off


@pytest.mark.parametrize("keeps", ["blocks.0", "blocks.1.attention", "head"])
def test_what_forward_hooks_of_a_loop_keep_is_whole_in_its_loss(keeps: str):
    assert max(map(max, run_ranks(kept_by_hooks, 2, keeps))) < TIGHT
