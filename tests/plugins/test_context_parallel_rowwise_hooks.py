"""Context parallelism: hooks of modules that work on local shards, and inside of them.

Those of a projection that tp shards, or of experts, see whole sequences; inside, what relates rows is refused.

Shapes: B samples, S positions, D features, N experts, R rows of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import mine, write_manifest
from support.sequence_models import LENGTH, VOCAB
from support.sequence_steps import context, padded_batch, sequence_steps
from torch import Tensor, nn

import composer3d
from composer3d.propagation import PropagationError
from composer3d.testing import run_ranks

D = 8
ROWWISE = context(more='rowwise = ["blocks.*.mixture"]\n[sharding.fsdp2]\n')
TENSOR = context(mesh="tp = 2", more="[sharding.fsdp2]\n[sharding.tensor_parallel]\n")
RECOMPUTED = f"{ROWWISE}[scheduling.activation_checkpoint]\nmode = 'full'\n"


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.of_rows: Callable[[Tensor], Any] | None = None

    def forward(self, x_RD: Tensor) -> Tensor:
        h = F.gelu(self.up(x_RD))
        if self.of_rows is not None and h.requires_grad:
            h.register_hook(self.of_rows)
        return self.down(h)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 2), nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x, weights = x_BSD.flatten(0, 1), self.gate(x_BSD).softmax(-1).flatten(0, 1)
        out, chosen = torch.zeros_like(x), weights.argmax(-1)
        for number, expert in enumerate(self.experts):
            row = torch.where(chosen == number)[0]
            out = out.index_add(0, row, expert(x[row]) * weights[row, number, None])
        return out.view_as(x_BSD)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.mixture = nn.Linear(D, 3 * D), nn.Linear(D, D), Mixture()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mixture(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(LENGTH, D)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(D, VOCAB)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def limited(g: Tensor) -> Tensor:
    """Return a gradient that is neither linear in it nor of each position by itself."""
    return (g - g.mean(1, keepdim=True)).clamp(-2e-3, 2e-3)


def of_tensors(module: nn.Module, given: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(limited)
        given[0].register_hook(limited)


def scaled(x: Tensor) -> Tensor:
    return x * (1 + x.mean(1, keepdim=True).tanh())


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda _, given, output: scaled(output)),
    "before": lambda m: m.register_forward_pre_hook(lambda _, given: (scaled(given[0]),)),
    "backward": lambda m: m.register_full_backward_hook(lambda _, into, outof: (limited(into[0]),)),
    "before the backward": lambda m: m.register_full_backward_pre_hook(lambda _, outof: (limited(outof[0]),)),
    "of tensors": lambda m: m.register_forward_hook(of_tensors),
}


def around(name: str, fqn: str) -> Model:
    model = Model()
    AROUND[name](model.get_submodule(fqn))
    return model


def assert_one_devices(world_size: int, cases: list[Any]) -> None:
    for found in run_ranks(sequence_steps, world_size, cases):
        wrong = [(at, each[:3]) for at, each in enumerate(found) if not max(each[:2]) <= 1e-12]
        assert wrong == []


@pytest.mark.parametrize("text", [ROWWISE, pytest.param(RECOMPUTED, marks=pytest.mark.slow)])
def test_hooks_of_modules_that_are_rowwise_see_whole_sequences(text: str):
    cases = [(partial(around, name, "blocks.1.mixture"), text, padded_batch) for name in AROUND]
    assert_one_devices(2, cases)


def test_hooks_of_projections_that_tp_shards_see_whole_sequences():
    assert_one_devices(4, [(partial(around, name, "blocks.1.qkv"), TENSOR, padded_batch) for name in AROUND])


@pytest.mark.slow
def test_hooks_of_projections_whose_inputs_tp_shards_see_whole_sequences():
    assert_one_devices(4, [(partial(around, name, "blocks.0.out"), TENSOR, padded_batch) for name in AROUND])


def by_row(g: Tensor) -> Tensor:
    """Return a gradient of which each row is limited by itself, and each number."""
    return torch.where(g.abs() > 1e-4, g / (g.norm(dim=-1, keepdim=True) + 1e-3), g * 2).clamp(-1e-2, 1e-2)


def inside(*, of_module: bool, hook: Callable[[Tensor], Any]) -> Model:
    model = Model()
    for block in model.blocks:
        for expert in block.mixture.experts:
            if of_module:
                expert.up.register_full_backward_pre_hook(lambda _, given: (hook(given[0]),))
                expert.down.register_full_backward_hook(lambda _, into, given: (hook(into[0]),))
            else:
                expert.of_rows = hook
    return model


def test_hooks_inside_may_compute_with_each_row():
    cases = [(partial(inside, of_module=each, hook=by_row), ROWWISE, padded_batch) for each in (False, True)]
    assert_one_devices(2, cases)


def retained() -> Model:
    model = Model()
    model.get_submodule("blocks.0.mixture.experts.1.up").register_forward_hook(
        lambda _, given, output: output.retain_grad() if output.requires_grad else None
    )
    return model


REFUSED: dict[str, tuple[Callable[[], Model], str]] = {
    "norm": (partial(inside, of_module=False, hook=lambda g: g / g.norm()), "norm"),
    "mean": (partial(inside, of_module=True, hook=lambda g: g - g.mean(0)), "mean"),
    "number": (partial(inside, of_module=False, hook=lambda g: g / g.shape[0]), "shape"),
    "value": (partial(inside, of_module=False, hook=lambda g: g * g[0, 0].item()), "__getitem__"),
    "order": (partial(inside, of_module=True, hook=lambda g: g.flip(0)), "flip"),
}


def refused(factories: list[Callable[[], Model]]) -> list[str]:
    (tokens,), _, targets = padded_batch()
    found = []
    for factory in factories:
        run = composer3d.compose(
            factory(), write_manifest(ROWWISE), loss_fn=lambda o, t: o.square().mean(), example=((tokens,), {})
        )
        try:
            with run.step(0):
                run.forward_backward(mine(run, tokens), target=mine(run, targets))
        except PropagationError as error:
            found.append(str(error))
        finally:
            run.close()
    return found


def test_what_relates_rows_inside_is_refused_by_name():
    for found in run_ranks(refused, 2, [factory for factory, _ in REFUSED.values()]):
        assert len(found) == len(REFUSED)
        for said, (_, name) in zip(found, REFUSED.values(), strict=True):
            assert f': {name} inside of "blocks.1.mixture" (test_context_parallel_rowwise_hooks.py:' in said
            assert "whose rows are of a rank's positions, in any order: the hook would relate these alone" in said


def legacy() -> Model:
    model = Model()
    model.head = nn.Sequential(model.head, nn.Tanh())
    model.head[1].register_backward_hook(lambda _, into, given: (into[0] - into[0].mean(1, keepdim=True),))
    return model


def test_positions_that_hooks_of_a_last_function_relate_are_refused():
    for (said,) in run_ranks(refused, 2, [legacy]):
        assert said.startswith("the backward hook <lambda> (test_context_parallel_rowwise_hooks.py:")
        assert ": mean (test_context_parallel_rowwise_hooks.py:" in said
        assert said.endswith("use register_full_backward_hook")


def test_gradients_of_rows_inside_are_not_retained():
    for (said,) in run_ranks(refused, 2, [retained]):
        assert said.startswith('retain_grad inside of "blocks.0.mixture" (test_context_parallel_rowwise_hooks.py:')
        assert said.endswith("write it for what the module is given, or returns")
