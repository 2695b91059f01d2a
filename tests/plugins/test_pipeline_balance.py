"""Where a pipeline is cut: against all cuts there are, and for blocks of unequal cost."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from composer3d_plugins.scheduling.pipeline.balance import Load, balance, peak_in_flight
from composer3d_plugins.scheduling.pipeline.schedule_rules import order_of_one_stage
from support.models import VOCAB, composed, seeded
from torch import nn

from composer3d.testing import run_ranks


def objective(cuts, load, in_flight):
    ends = [*cuts[1:], len(load.costs)]
    costs, memories = [], []
    for stage, (start, end) in enumerate(zip(cuts, ends, strict=True)):
        extra = load.first_cost * (stage == 0) + load.last_cost * (stage == len(cuts) - 1)
        costs.append(sum(load.costs[start:end]) + extra)
        held = in_flight[stage] * sum(load.activations_bytes[start:end])
        memories.append(4 * sum(load.parameters_bytes[start:end]) + held)
    return max(costs), max(memories), sum(cost**2 for cost in costs)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_is_better(seed):
    drawn = random.Random(seed)
    num_blocks, num_stages = drawn.randint(4, 9), drawn.randint(2, 4)
    # Few different costs: most of these have several cuts with one costliest stage.
    load = Load(
        costs=[float(drawn.randint(1, 3)) for _ in range(num_blocks)],
        first_cost=float(drawn.randint(0, 2)),
        last_cost=float(drawn.randint(0, 4)),
        parameters_bytes=[float(drawn.randint(1, 3)) for _ in range(num_blocks)],
        activations_bytes=[float(drawn.randint(1, 3)) for _ in range(num_blocks)],
    )
    in_flight = [num_stages - stage for stage in range(num_stages)]
    every = [[0, *cut] for cut in itertools.combinations(range(1, num_blocks), num_stages - 1)]
    found = balance(load, num_stages=num_stages, in_flight=in_flight)
    assert found in every
    assert objective(found, load, in_flight) == min(objective(cuts, load, in_flight) for cuts in every)


def equal(num_blocks, **more):
    ones = [1.0] * num_blocks
    return Load(costs=ones, parameters_bytes=ones, activations_bytes=ones, **more)


def test_embedding_and_head_count():
    assert balance(equal(8), num_stages=4) == [0, 2, 4, 6]
    assert balance(equal(8, last_cost=2.0), num_stages=2) == [0, 5]
    assert balance(equal(8, first_cost=2.0), num_stages=2) == [0, 3]


@pytest.mark.parametrize(
    ("schedule", "in_flight", "expected"),
    [("1F1B", [4, 3, 2, 1], [0, 1, 3, 6]), ("GPipe", [8, 8, 8, 8], [0, 2, 4, 6])],
)
def test_earlier_stages_hold_more_activations(schedule, in_flight, expected):
    actions = [
        (rank, kind, index)
        for rank in range(4)
        for kind, index in order_of_one_stage(schedule, rank, degree=4, num_microbatches=8)
    ]
    assert peak_in_flight(actions, 4) == in_flight
    # Nine blocks on four stages: some have three. Which, makes no difference to time, and much to memory.
    load = Load(costs=[1.0] * 9, parameters_bytes=[0.0] * 9, activations_bytes=[1.0] * 9)
    found = balance(load, num_stages=4, in_flight=in_flight)
    assert found == expected
    assert max(end - start for start, end in itertools.pairwise([*found, 9])) == 3


PIPELINE = '[mesh]\npp = 2\n[scheduling.pipeline]\n[model]\nblocks = "layers.*"\n'


class Unequal(nn.Module):
    """The third block costs as much as the five others together."""

    def __init__(self, head):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(Wide(40 if index == 2 else 8) for index in range(6))
        self.out = nn.Linear(8, head)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Wide(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def blocks_of(head):
    run = composed(PIPELINE, seeded(Unequal, head=head))
    found = [int(name.split(".")[1]) for name, _ in run.parts[0].module.named_modules() if name.count(".") == 1]
    run.close()
    return found


@pytest.mark.parametrize(("head", "first"), [(VOCAB, [0, 1, 2]), (200, [0, 1, 2, 3, 4])])
def test_unequal_blocks(head, first):
    found = run_ranks(blocks_of, 2, head)
    assert found == [first, [index for index in range(6) if index not in first]]
