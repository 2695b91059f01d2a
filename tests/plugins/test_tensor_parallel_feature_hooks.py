"""Tensor parallelism: hooks on modules whose activations are sharded by feature see what they do on one device.

Shapes: B samples, S positions, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kept_losses import VOCAB, D, entropy, given
from support.models import write_manifest
from torch import Tensor, nn

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
FEATURES = "mesh.tp = 2\n[sharding.tensor_parallel]\n"
SEQUENCE = FEATURES + "sequence_parallel = true\n"
STATED = FEATURES + 'plan = { "layers.*.up" = "colwise", "layers.*.down" = "rowwise" }\n'


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D)
        self.hook: Callable[[Tensor], Any] | None = None
        self.what = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.noted("inside", self.act(self.up(self.norm(x))))
        y = self.noted("result", self.down(y))
        return self.noted("sum", x + y)

    def noted(self, what: str, x: Tensor) -> Tensor:
        if self.hook is not None and self.what == what and x.requires_grad:
            self.hook(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.layers = nn.Embedding(VOCAB, D), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def centred(x: Tensor) -> Tensor:
    return x - 0.5 * x.mean(-1, keepdim=True) + 0.1 * x.cumsum(-1)


def of_output(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return centred(output)


def of_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (centred(args[0]),)


def with_input(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return output + 0.1 * args[0].std(-1, keepdim=True)


def on_output(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(centred)


def ahead_of(x: Tensor) -> None:
    x.grad_fn.register_prehook(lambda gradients: (centred(gradients[0]),))


def behind(x: Tensor) -> None:
    x.grad_fn.register_hook(lambda given, _: tuple(centred(each) for each in given))


def further(x: Tensor) -> None:
    x.grad_fn.next_functions[0][0].register_hook(lambda given, _: tuple(map(centred, given)))


Registered = Callable[[Block], Any]


def in_code(hook: Callable[[Tensor], Any], what: str) -> Registered:
    def register(block: Block) -> None:
        block.hook, block.what = hook, what

    return register


# Of a block.
FORWARD: dict[str, Registered] = {
    "output of an expanding layer": lambda block: block.up.register_forward_hook(of_output),
    "gradient of that": lambda block: block.up.register_forward_hook(on_output),
    "output of an activation": lambda block: block.act.register_forward_hook(of_output),
    "input of an activation": lambda block: block.act.register_forward_pre_hook(of_input),
    "both of an activation": lambda block: block.act.register_forward_hook(with_input),
    "input of a contracting layer": lambda block: block.down.register_forward_pre_hook(of_input),
    "its gradient, in code": in_code(lambda y: y.register_hook(centred), "inside"),
    "its node, in code": in_code(ahead_of, "inside"),
    "behind its node, in code": in_code(behind, "inside"),
}
# On nodes of what is whole but along the sequence, and of what may be.
WHOLE: dict[str, Registered] = {
    "node of a sum": in_code(ahead_of, "sum"),
    "behind the node of a sum": in_code(behind, "sum"),
    "node of a contracting layer": in_code(ahead_of, "result"),
}
UNKNOWN: dict[str, Registered] = {
    "behind the node of a contracting layer": in_code(behind, "result"),
    "node that is reached from another": in_code(further, "result"),
}


def built(register: Registered, at: int | None) -> Model:
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers if at is None else [model.layers[at]]:
        register(layer)
    return model


def errors(text: str, cases: dict[str, Registered], at: int | None) -> dict[str, float]:
    """Return how far values and gradients are from one device's, with hooks on one block, or on all."""
    torch.set_default_dtype(torch.float64)
    (x, y), found = given(padded=False), {}
    for name, register in cases.items():
        reference, model = built(register, at), built(register, at)
        wanted = entropy(reference(x), y)
        wanted.backward()
        run = composer3d.compose(
            model, write_manifest(text), loss_fn=entropy, loss_reduction="mean", example=((x,), {})
        )
        with run.step(0):
            value = run.forward_backward(x, target=y)
            own = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters()}
        run.close()
        pairs = [(own[fqn], p.grad) for fqn, p in reference.named_parameters()] + [(value, wanted.detach())]
        found[name] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    return found


@pytest.mark.parametrize("text", [FEATURES, SEQUENCE])
def test_hooks_that_one_later_block_has_are_seen_by_the_plan(text: str):
    for found in run_ranks(errors, 2, text, FORWARD, 2):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


@pytest.mark.parametrize("at", [None, 1])
@pytest.mark.parametrize("text", [FEATURES, SEQUENCE])
def test_hooks_on_nodes_of_the_graph_are_given_whole_gradients(text: str, at: int | None):
    for found in run_ranks(errors, 2, text, WHOLE, at):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


@pytest.mark.parametrize("text", [FEATURES, SEQUENCE])
def test_blocks_with_hooks_on_nodes_that_are_others_over_tp_stay_whole(text: str):
    for found in run_ranks(errors, 2, text, UNKNOWN, 1):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def refusals(text: str, cases: dict[str, Registered], at: int | None) -> list[str]:
    torch.set_default_dtype(torch.float64)
    (x, _), found = given(padded=False), []
    for register in cases.values():
        with pytest.raises(composer3d.ManifestError) as caught:
            composer3d.compose(built(register, at), write_manifest(text), loss_fn=entropy, example=((x,), {}))
        found.append(str(caught.value))
    return found


def test_a_stated_plan_that_shards_what_they_relate_is_refused():
    for found in run_ranks(refusals, 2, STATED, FORWARD, 1):
        assert all("the plan does not fit the model's code" in message for message in found)


def test_hooks_on_nodes_that_are_others_over_tp_are_refused_where_nothing_else_is_sharded():
    for found in run_ranks(refusals, 2, FEATURES, UNKNOWN, None):
        assert '"layers.0": a hook is behind a node of the graph that is another one over tp (test_' in found[0]
        assert '"layers.0": a hook is on a node of the graph that no tensor was asked for (test_' in found[1]
        assert all(
            "register it on the tensor, as in t.register_hook, or before the node, as in" in each for each in found
        )
