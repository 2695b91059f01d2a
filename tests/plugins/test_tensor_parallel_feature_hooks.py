"""Tensor parallelism: hooks on modules whose activations are sharded by feature see what they do on one device.

Shapes: B samples, S positions, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(self.norm(x)))
        if self.hook is not None and y.requires_grad:
            y.register_hook(self.hook)
        return x + self.down(y)


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


Registered = Callable[[Block], Any]
# Of a block.
FORWARD: dict[str, Registered] = {
    "output of an expanding layer": lambda block: block.up.register_forward_hook(of_output),
    "gradient of that": lambda block: block.up.register_forward_hook(on_output),
    "output of an activation": lambda block: block.act.register_forward_hook(of_output),
    "input of an activation": lambda block: block.act.register_forward_pre_hook(of_input),
    "both of an activation": lambda block: block.act.register_forward_hook(with_input),
    "input of a contracting layer": lambda block: block.down.register_forward_pre_hook(of_input),
    "its gradient, in code": lambda block: setattr(block, "hook", centred),
}


def built(register: Registered | None, at: int) -> Model:
    torch.manual_seed(0)
    model = Model()
    if register is not None:
        register(model.layers[at])
    return model


def errors(text: str, *, at: int) -> dict[str, float]:
    """Return how far values and gradients are from one device's, with hooks on one block that is not the first."""
    torch.set_default_dtype(torch.float64)
    (x, y), found = given(padded=False), {}
    for name, register in FORWARD.items():
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
    for found in run_ranks(partial(errors, at=2), 2, text):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def refusals(text: str) -> list[str]:
    torch.set_default_dtype(torch.float64)
    (x, _), found = given(padded=False), []
    for register in FORWARD.values():
        with pytest.raises(composer3d.ManifestError) as caught:
            composer3d.compose(built(register, 1), write_manifest(text), loss_fn=entropy, example=((x,), {}))
        found.append(str(caught.value))
    return found


def test_a_stated_plan_that_shards_what_they_relate_is_refused():
    for found in run_ranks(refusals, 2, STATED):
        assert all("the plan does not fit the model's code" in message for message in found)
