"""Hooks on the whole model, on its output and on what a loop keeps of it, and gradients that are retained.

Shapes: B samples, S positions, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import composer3d
from support.models import write_manifest

VOCAB, D = 11, 8
SEEN: list[Tensor] = []  # by hooks, numbers of each sample
KEPT: list[Tensor] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(16, D)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(D, VOCAB)
        self.bound, self.limits = nn.Tanh(), False

    def forward(self, idx: Tensor, noise: Tensor) -> Tensor:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1])) + noise
        for block in self.blocks:
            x = block(x)
            if self.limits and x.requires_grad:
                x.register_hook(limited)
        return self.head(self.bound(x))


def limited(g: Tensor) -> Tensor:
    """Return a gradient that is neither linear in it nor of each position by itself."""
    return (g - g.mean(1, keepdim=True)).clamp(-2e-3, 2e-3)


def hook_output(module: nn.Module, given: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(limited)


def keep(module: nn.Module, given: Any, output: Tensor) -> None:
    KEPT.append(output)


def retain(module: nn.Module, given: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.retain_grad()
        KEPT.append(output)


def hook_inside(module: nn.Module, given: Any, output: Tensor) -> None:
    """Register a hook on what follows from a module's output inside of the model."""
    if output.requires_grad:
        output.register_hook(limited)
        given[0].register_hook(limited)


def look(module: nn.Module, into: Any, outof: Any) -> None:
    SEEN.extend(each.square().sum(1).detach().clone() for each in (into[1], outof[0]))


PREPARED: dict[str, Callable[[nn.Module], Any]] = {
    "before the model": lambda m: m.register_full_backward_pre_hook(lambda _, given: (limited(given[0]),)),
    "after the model": lambda m: m.register_full_backward_hook(look),
    "its output": lambda m: m.register_forward_hook(hook_output),
    "kept": lambda m: m.get_submodule("blocks.0").register_forward_hook(keep),
    "retained later": lambda m: m.get_submodule("blocks.0").register_forward_hook(keep),
    "retained": lambda m: m.get_submodule("blocks.1.out").register_forward_hook(retain),
    "retained output": lambda m: None,
    "output in the loss": lambda m: None,
}
# Of which no output of the model is the tensor.
INSIDE: dict[str, Callable[[nn.Module], Any]] = {
    "inside": lambda m: m.get_submodule("blocks.1.out").register_forward_hook(hook_inside),
    "retained inside": lambda m: m.get_submodule("blocks.0.out").register_forward_hook(retain),
    "kept": PREPARED["kept"],
    "retained later": PREPARED["retained later"],
    "by the model": lambda m: setattr(m, "limits", True),
    "in a full backward": lambda m: m.get_submodule("blocks.0").register_full_backward_hook(
        lambda _, given, __: (limited(given[0]),)
    ),
    "in a backward": lambda m: m.get_submodule("bound").register_backward_hook(
        lambda _, given, __: (given[0].clamp(-2e-3, 2e-3),)
    ),
}


def loss_of(name: str, o: Tensor, t: Tensor) -> Tensor:
    if name == "kept" and KEPT[-1].requires_grad:
        KEPT[-1].register_hook(limited)
    if name == "retained later" and KEPT[-1].requires_grad:
        KEPT[-1].retain_grad()
    if name == "retained output" and o.requires_grad:
        o.retain_grad()
        KEPT.append(o)
    if name == "output in the loss" and o.requires_grad:
        o.register_hook(limited)
    return F.cross_entropy(o.flatten(0, 1), t.flatten())


def _noted(name: str) -> list[Tensor]:
    """Return what hooks have seen, or the last gradient that was retained."""
    found = [KEPT[-1].grad] if name.startswith("retained") else list(SEEN)
    SEEN.clear()
    KEPT.clear()
    return found


def errors(names: list[str], text: str, *, length: int = 8, late: bool = False, after: int = 0) -> dict[str, float]:
    """Return how far gradients, and what hooks see, are from one device's in two steps of a loop and of the engine.

    Args:
        names: Of `PREPARED`.
        text: Of the manifest.
        length: Of sequences.
        late: Whether hooks are registered on the composed model.
        after: So many steps without any come first; then they are registered on the composed model.
    """
    torch.set_default_dtype(torch.float64)
    generator, found = torch.Generator().manual_seed(1), {}
    x, y = (torch.randint(0, VOCAB, (4, length), generator=generator) for _ in range(2))
    noise = torch.randn(4, 1, D, generator=generator).requires_grad_()
    for name in names:
        reference, model = _seeded(), _seeded()
        prepare, plain = (PREPARED | INSIDE)[name], "" if after else name
        prepare(reference)
        loss_of(name, reference(x, noise), y).backward()
        wanted, grads = _noted(name), {fqn: p.grad for fqn, p in reference.named_parameters()}
        if not (late or after):
            prepare(model)
        steps = [0]

        def loss(o: Tensor, t: Tensor, name: str = name, plain: str = plain, steps: list[int] = steps) -> Tensor:
            return loss_of(plain if steps[0] < after else name, o, t)

        run = composer3d.compose(model, write_manifest(text), loss_fn=loss, example=((x, noise), {}))
        if late:
            prepare(run.model)
        _noted("")
        size = len(x) // run.context.data_parallel_degree
        mine = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
        for steps[0] in range(after + 4):
            step = steps[0]
            if after and step == after:
                prepare(run.model)
            run.model.zero_grad()
            with run.step(step):
                if step % 2:
                    run.backward(loss(run.model(x[mine], noise[mine]), y[mine]))
                else:
                    run.forward_backward(x[mine], noise[mine], target=y[mine])
                own = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters()}
            pairs = [(own[fqn], grad) for fqn, grad in grads.items()]
            if step < after:
                continue
            seen = _noted(name)
            assert len(seen) == len(wanted)
            pairs += [(one, other[mine]) for one, other in zip(seen, wanted, strict=True)]
            found[f"{name} {step}"] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
        run.close()
    assert not torch.overrides._get_current_function_mode_stack()
    return found


def _seeded() -> Model:
    torch.manual_seed(0)
    return Model()
