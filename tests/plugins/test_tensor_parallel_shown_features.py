"""Tensor parallelism: hooks of a loop on activations whose features are sharded are given those of all ranks.

Shapes: B samples, S positions, D features, H heads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.kept_losses import VOCAB, D, entropy, given
from support.models import write_manifest
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

import composer3d
from composer3d.testing import count_collectives, run_ranks

TIGHT = 1e-12
FEATURES = "mesh.tp = 2\n[sharding.tensor_parallel]\n"
SEQUENCE = FEATURES + "sequence_parallel = true\n"
STATED = FEATURES + (
    'plan = { "layers.*.up" = "colwise", "layers.*.down" = "rowwise", "layers.*.qkv" = { style = "packed_colwise", '
    'parts = [8, 8, 8] }, "layers.*.out" = "rowwise", "layers.*.scale" = "local" }\n'
)
RECOMPUTED = FEATURES + '[scheduling.activation_checkpoint]\nmode = "full"\n'
COMPILED = STATED + '[scheduling.compile]\nbackend = "aot_eager"\n'
CONTEXT = "mesh = { cp = 2, tp = 2 }\n[sharding.tensor_parallel]\n[sharding.context_parallel]\n[sharding.fsdp2]\n"


class Core(nn.Module):
    """Attention that is given heads by name."""

    def forward(self, q: Tensor, *, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.scale, self.core = nn.LayerNorm(D // 2), Core()
        self.up, self.act, self.down = nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 2, -1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k, v = (each.transpose(1, 2) for each in (self.scale(q), k, v))
        x = x + self.out(self.core(q, k=k, v=v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.layers = nn.Embedding(VOCAB, D), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixed(x: Tensor) -> Tensor:
    """Relate all features and positions of a sample."""
    dims = list(range(1, x.ndim))
    return x + 0.3 * x.square().mean(dims, keepdim=True).sqrt() + 0.1 * x.cumsum(-1)


def of_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return mixed(output)


def of_input(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return mixed(args[0])


def of_both(module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
    heads = args[0] if not kwargs else kwargs["k"] + args[0]
    return output * heads.mean() + (mixed(heads) if heads.shape == output.shape else 0.0)


def of_names(module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Tensor]) -> Any:
    return (mixed(args[0]),), {name: mixed(value) for name, value in kwargs.items()}


def on_both(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    for each in (args[0], output):
        if each.requires_grad:
            each.register_hook(mixed)


def on_node(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    if output.requires_grad:
        output.grad_fn.register_prehook(lambda gradients: (mixed(gradients[0]),))


def on_several(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    if output.requires_grad:
        torch.autograd.graph.register_multi_grad_hook([args[0], output], lambda given: KEPT.extend(given))


def doubled(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    output.mul_(1 + output.detach().std())


def backward(module: nn.Module, of_inputs: tuple[Tensor, ...], of_outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    KEPT.append(of_outputs[0])
    return tuple(each if each is None else mixed(each) for each in of_inputs)


KEPT: list[Tensor] = []


def keep(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    if output.requires_grad:
        output.retain_grad()
    KEPT.append(output)


def of_acts(hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, *rest: hook(module, *rest) if isinstance(module, nn.Tanh) else None


Registered = Callable[[Block], Any]
# Of a block; each returns what removes it, or several that do.
CASES: dict[str, Registered] = {
    "parts": lambda b: b.qkv.register_forward_hook(of_output),
    "heads": lambda b: b.scale.register_forward_hook(of_output),
    "input of heads": lambda b: b.scale.register_forward_pre_hook(of_input),
    "by name": lambda b: b.core.register_forward_hook(of_both, with_kwargs=True),
    "by name, before": lambda b: b.core.register_forward_pre_hook(of_names, with_kwargs=True),
    "before torch's": lambda b: b.up.register_forward_hook(of_output, prepend=True),
    "before torch's, of a sum": lambda b: b.down.register_forward_hook(of_output, prepend=True),
    "with the input": lambda b: b.down.register_forward_hook(of_both, with_kwargs=True),
    "with the whole input": lambda b: b.up.register_forward_hook(of_both, with_kwargs=True),
    "input of a projection": lambda b: b.up.register_forward_pre_hook(of_input),
    "input of a sum": lambda b: b.down.register_forward_pre_hook(of_input),
    "gradients": lambda b: b.down.register_forward_hook(on_both),
    "gradients inside": lambda b: b.act.register_forward_hook(on_both),
    "node": lambda b: b.act.register_forward_hook(on_node),
    "several gradients": lambda b: b.act.register_forward_hook(on_several),
    "written": lambda b: b.up.register_forward_hook(doubled),
    "backward of heads": lambda b: b.core.register_full_backward_hook(backward),
    "backward of a projection": lambda b: b.up.register_full_backward_hook(backward),
    "backward of a sum": lambda b: b.down.register_full_backward_hook(backward),
    "before a backward": lambda b: b.act.register_full_backward_pre_hook(lambda _, g: (mixed(g[0]),)),
    "kept": lambda b: b.qkv.register_forward_hook(keep),
    "of all modules": lambda b: register_module_forward_hook(of_acts(of_output)),
    "of all modules, backward": lambda b: register_module_full_backward_hook(of_acts(backward)),
}


# Given a sequence that sequence_parallel shards, which a warning says.
POSITIONS = ["backward of a sum", "gradients"]
# On a node, and such as a loss over cp reads from a list, which are refused there, and of several tensors of a loop's.
OVER_CP = ["node", "kept", "several gradients"]


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    loss = entropy(output, targets)
    return loss + sum((mixed(x).std() for x in KEPT if x.requires_grad), torch.zeros(()))


class Trained:
    """A model, on one device or composed, that takes steps with hooks on its second block, and steps without."""

    def __init__(self, text: str) -> None:
        torch.manual_seed(0)
        self.model, self.num_steps = Model(), 0
        (self.x, self.y), self.run = given(padded=False), None
        if text:
            self.run = composer3d.compose(
                self.model,
                write_manifest(text),
                loss_fn=loss_of,
                loss_reduction="mean",
                example=((self.x,), {}),
            )
            self.model = self.run.model

    def seen(self, register: Registered) -> list[Tensor]:
        """Return the losses, gradients and what hooks kept, of a step with hooks and of one without."""
        found: list[Tensor] = []
        for has_hooks in (True, False):
            handle = register(self.model.layers[1]) if has_hooks else None
            KEPT.clear()
            self.model.zero_grad()
            found += self.step()
            found += [each.grad for each in KEPT if each.grad_fn is not None and each.grad is not None]
            found += [each.detach() for each in KEPT]
            if handle is not None:
                handle.remove()
        KEPT.clear()
        return found

    def step(self) -> list[Tensor]:
        if self.run is None:
            loss = loss_of(self.model(self.x), self.y)
            loss.backward()
            return [loss.detach(), *(p.grad.clone() for p in self.model.parameters())]
        with self.run.step(self.num_steps):
            loss = self.run.forward_backward(self.x, target=self.y)
            gradients = [self.run.full_tensor(fqn, p.grad) for fqn, p in self.run.named_parameters()]
        self.num_steps += 1
        return [loss.detach(), *(each.clone() for each in gradients)]


def errors(text: str, left_out: list[str]) -> dict[str, float]:
    """Return how far all that hooks see and change is from one device's, where they come after some steps."""
    torch.set_default_dtype(torch.float64)
    for text_of_warning in (".*given the positions of their rank", "Full backward hook is firing"):
        warnings.filterwarnings("ignore", message=text_of_warning)
    reference, trained, found = Trained(""), Trained(text), {}
    trained.step()
    for name, register in CASES.items():
        if name not in left_out:
            pairs = zip(trained.seen(register), reference.seen(register), strict=True)
            found[name] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    trained.run.close()
    return found


@pytest.mark.parametrize(
    ("text", "world_size", "left_out"),
    [
        pytest.param(FEATURES, 2, [], id="derived"),
        pytest.param(STATED, 2, [], id="stated"),
        pytest.param(SEQUENCE, 2, POSITIONS, id="sequence"),
        pytest.param(RECOMPUTED, 2, [], id="recomputed"),
        pytest.param(COMPILED, 2, [], id="compiled"),
        pytest.param(CONTEXT, 4, OVER_CP, id="cp"),
    ],
)
def test_a_loops_hooks_are_given_the_features_of_all_ranks(text: str, world_size: int, left_out: list[str]):
    for found in run_ranks(errors, world_size, text, left_out):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def of_another_size(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output[..., :3]


def writing(module: nn.Module, args: Any) -> None:
    args[0].detach().zero_()


def last_gradients(module: nn.Module, of_inputs: Any, of_outputs: Any) -> None:
    return None


REFUSALS: dict[str, tuple[Registered, str]] = {
    "size": (
        lambda b: b.act.register_forward_hook(of_another_size),
        "the hook of_another_size returns [4, 8, 3] in place of a tensor with 16 features in dim 2, of which a rank "
        'has a part behind "layers.1.act"; let it return one of that size',
    ),
    "number": (
        lambda b: b.act.register_forward_hook(lambda module, args, output: (output, output)),
        "the hook <lambda> returns 2 values in place of 1, of which a rank has a part behind",
    ),
    "written": (
        lambda b: b.act.register_forward_pre_hook(writing),
        "the hook writing writes into an activation of which a rank has a part, and is given another tensor; let a "
        "hook before the forward return its result",
    ),
    "last gradients": (
        lambda b: b.act.register_backward_hook(last_gradients),
        'the hook last_gradients: register_backward_hook on "layers.1.act", which has a rank\'s features, is given the '
        "gradients of its last function; use register_full_backward_hook",
    ),
}


def refusals(text: str) -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    found, trained = {}, Trained(text)
    for name, (register, _) in REFUSALS.items():
        handle = register(trained.model.layers[1])
        with pytest.raises(composer3d.StepError) as caught:
            loss_of(trained.model(trained.x), trained.y).backward()
        found[name] = str(caught.value)
        handle.remove()
    trained.run.close()
    return found


def test_hooks_whose_results_cannot_be_sharded_are_refused():
    for found in run_ranks(refusals, 2, FEATURES):
        for name, (_, message) in REFUSALS.items():
            assert message in found[name]


def gathered(text: str) -> list[Any]:
    """Return the collectives of steps without hooks, with one that looks, and when it is gone."""
    found, trained = [], Trained(text)
    for hook in (None, lambda *_: None, None):
        handle = trained.model.layers[1].act.register_forward_hook(hook) if hook is not None else None
        with count_collectives(trained.run.mesh) as collectives:
            trained.step()
            found.append(collectives.summary())
        if handle is not None:
            handle.remove()
    trained.run.close()
    return found


def test_steps_without_hooks_gather_nothing():
    for without, looked, gone in run_ranks(gathered, 2, FEATURES):
        assert without == gone != looked
