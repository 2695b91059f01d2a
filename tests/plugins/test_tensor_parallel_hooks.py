"""Sequence parallelism: hooks of a model's own see whole sequences, and those of a loop are told that they do not.

Shapes: B samples, S positions, D features.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.kept_losses import VOCAB, D, entropy, given
from support.models import write_manifest
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
SEQUENCE = "mesh.tp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n"
PLAN = (
    'plan = { "layers.*.up" = "colwise", "layers.*.down" = "rowwise", "layers.0" = "split", "layers.2" = "gather", '
    '"layers.*.norm" = "sequence", tok = "replicate", head = "replicate" }\n'
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.hooks: Callable[[Tensor], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        if self.hooks is not None and x.grad_fn is not None:
            self.hooks(x)
        return x


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.tok, self.layers = nn.Embedding(VOCAB, D), nn.ModuleList(Block() for _ in range(3))
        self.head, self.name, self.between = nn.Linear(D, VOCAB), name, list[Tensor]()

    def forward(self, tokens: Tensor) -> Tensor:
        handle = IN_FORWARD[self.name](self) if self.name in IN_FORWARD else None
        try:
            return self.through(tokens)
        finally:
            if handle is not None:
                handle.remove()

    def through(self, tokens: Tensor) -> Tensor:
        self.between = []
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
            if self.name == "kept by the root":
                self.between.append(x)
            if self.name == "between blocks" and x.requires_grad:
                x.register_hook(centred)
            if self.name == "on nodes between blocks" and x.requires_grad:
                x.grad_fn.register_prehook(lambda g: (centred(g[0]),))
        return self.head(x)


def centred(g: Tensor) -> Tensor:
    return (g - g.mean(1, keepdim=True)) * g.shape[1]


def in_blocks(model: Model, hooks: Callable[[Tensor], Any]) -> None:
    for layer in model.layers:
        layer.hooks = hooks


REGISTERED: dict[str, Callable[[Model], Any]] = {
    "of a block, backward": lambda m: m.layers[0].register_full_backward_hook(lambda _, gi, go: (centred(gi[0]),)),
    "of a module inside, backward": lambda m: m.layers[1].up.register_full_backward_pre_hook(
        lambda _, go: (go[0].cumsum(1),)
    ),
    "with the input": lambda m: m.layers[2].register_forward_hook(lambda _, a, o: o + 0.1 * a[0].cumsum(1)),
    "of a norm": lambda m: m.layers[1].norm.register_forward_hook(lambda _, a, o: o - o.mean(1, keepdim=True)),
    "between blocks": lambda m: None,
    "kept by the root": lambda m: None,
    "on what blocks return, in their forward": lambda m: in_blocks(m, lambda x: x.register_hook(centred)),
    "on its node": lambda m: in_blocks(m, lambda x: x.grad_fn.register_prehook(lambda g: (centred(g[0]),))),
    "behind it": lambda m: in_blocks(m, lambda x: x.grad_fn.register_hook(lambda g, _: tuple(map(centred, g)))),
    "on nodes between blocks": lambda m: None,
}


def without_half_of_mean(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    return output - 0.5 * output.mean(1, keepdim=True) if isinstance(module, nn.LayerNorm) else None


# What a forward registers itself, and removes when it ends.
IN_FORWARD: dict[str, Callable[[Model], Any]] = {
    "of all modules, in the forward": lambda m: register_module_forward_hook(without_half_of_mean),
    "of a norm, in the forward": lambda m: m.layers[1].norm.register_forward_hook(without_half_of_mean),
}


def built(name: str) -> Model:
    torch.manual_seed(0)
    model = Model(name)
    REGISTERED.get(name, lambda m: None)(model)
    return model


def loss_of(model: Model, output: Tensor, targets: Tensor) -> Tensor:
    return entropy(output, targets) + sum((x - x.mean(1, keepdim=True)).square().mean() for x in model.between)


def errors(text: str) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    (x, y), found = given(padded=False), {}
    for name in (*REGISTERED, *IN_FORWARD):
        reference, model = built(name), built(name)
        wanted = loss_of(reference, reference(x), y)
        wanted.backward()
        run = composer3d.compose(
            model, write_manifest(text), loss_fn=lambda o, t, m=model: loss_of(m, o, t), loss_reduction="mean",
            example=((x,), {}),
        )  # fmt: skip
        with run.step(0):
            value = run.forward_backward(x, target=y)
            own = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters()}
        run.close()
        pairs = [(own[fqn], p.grad) for fqn, p in reference.named_parameters()] + [(value, wanted.detach())]
        # Some are zero: of what a hook takes the mean from.
        top = max(float(other.abs().max()) for _, other in pairs)
        found[name] = max(float((one - other).abs().max()) for one, other in pairs) / top
    return found


def test_hooks_of_the_model_and_what_it_keeps_between_blocks_are_of_whole_sequences():
    for found in run_ranks(errors, 2, SEQUENCE):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def warned(text: str) -> list[str]:
    torch.set_default_dtype(torch.float64)
    x, y = given(padded=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = composer3d.compose(built(""), write_manifest(text), loss_fn=entropy, example=((x,), {}))
        for step in range(4):
            if step == 1:
                run.model.layers[1].norm.register_forward_hook(lambda *_: None)
            with run.step(step):
                run.forward_backward(x, target=y)
        run.close()
    return [str(each.message) for each in found if "sequence_parallel" in str(each.message)]


@pytest.mark.parametrize("plan", [pytest.param("", id="derived"), pytest.param(PLAN, id="stated")])
def test_hooks_that_a_loop_registers_inside_are_warned_of_once(plan: str):
    for found in run_ranks(warned, 2, SEQUENCE + plan):
        assert found == [
            '"layers.1" has hooks, which are given the positions of their rank, one in 2, with sequence_parallel: '
            "register them before compose and leave plan out, and the block's sequence stays whole; or write "
            "sequence_parallel = false"
        ]


GIVEN: list[Tensor] = []


def clamped(g: Tensor) -> Tensor:
    GIVEN.append(g)
    return g / (g.norm(dim=-1, keepdim=True) + 1e-3)


def hook_input(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    if args[0].requires_grad:
        args[0].register_hook(clamped)


def of_inputs(text: str, *, is_late: bool) -> float:
    """Return how far gradients, and what a hook on the input of two projections was given, are from one device's."""
    torch.set_default_dtype(torch.float64)
    (x, y), found = given(padded=False), []
    for fqn in ("layers.1.up", "layers.2.down", "head"):
        reference, model = built(""), built("")
        for each in (reference,) if is_late else (reference, model):
            each.get_submodule(fqn).register_forward_hook(hook_input)
        GIVEN.clear()
        entropy(reference(x), y).backward()
        wanted = list(GIVEN)
        run = composer3d.compose(
            model, write_manifest(text), loss_fn=entropy, loss_reduction="mean", example=((x,), {})
        )
        if is_late:
            run.model.get_submodule(fqn).register_forward_hook(hook_input)
        GIVEN.clear()
        with run.step(0):
            run.forward_backward(x, target=y)
            own = {name: run.full_tensor(name, p.grad) for name, p in run.named_parameters()}
        run.close()
        pairs = [(own[name], p.grad) for name, p in reference.named_parameters()]
        if fqn != "layers.2.down":  # which is given features of its rank
            pairs += zip(GIVEN, wanted, strict=True)
        found += [float((one - other).detach().abs().max() / other.abs().max()) for one, other in pairs]
    return max(found)


@pytest.mark.parametrize("is_late", [False, True])
def test_hooks_on_what_projections_are_given_see_its_whole_gradient(is_late: bool):
    text = SEQUENCE.replace("true", "false")
    assert max(run_ranks(partial(of_inputs, is_late=is_late), 2, text)) < TIGHT


def refusals(text: str) -> list[str]:
    x, found = given(padded=False)[0], []
    on_tensor = REGISTERED["on what blocks return, in their forward"]
    for register in (lambda m: in_blocks(m, lambda x: x.grad_fn.register_prehook(centred)), on_tensor, None):
        model = built("" if register is not None else "of a norm, in the forward")
        if register is not None:
            register(model)
        with pytest.raises(composer3d.ManifestError) as caught:
            composer3d.compose(model, write_manifest(text), loss_fn=entropy, example=((x,), {}))
        found.append(str(caught.value))
    return found


def test_a_stated_plan_that_shards_a_sequence_where_a_forward_registers_hooks_is_refused():
    for messages in run_ranks(refusals, 2, SEQUENCE + PLAN):
        for message, block in zip(messages, ("layers.0", "layers.0", "layers.1"), strict=True):
            assert f'the forward of "{block}", or the model\'s around it, registers hooks, which would be' in message
            assert 'write plan = "auto", which leaves the sequence of such a block whole' in message
