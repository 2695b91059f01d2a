"""Parameters that only some ranks use, or none, stepped in the backward: those of a loop on one device."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.runner.objective.muon import Muon, group_matrices, matrices_of
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
OPTIONS = {"lr": 0.1, "weight_decay": 0.3}


class Experts(nn.Module):
    """Experts in a loop, each called only where a row goes to it; two vectors that only some rows need; one unused."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, size), nn.Linear(size, 4)) for size in (4, 6, 5))
        self.shifts = nn.ParameterList(torch.randn(5) for _ in range(3))

    def forward(self, x):
        h = self.enter(x)
        y = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            mask = x[:, 0].round() == index
            if mask.any():
                y[mask] = expert(h[mask]) * self.shifts[index].sum()
        return self.leave(h + y)


# The expert that each of eight rows goes to, in each step.
STEPS = [(0, 0, 0, 0, 1, 1, 1, 1), (0,) * 8, (2, 2, 2, 2, 2, 1, 2, 1), (0, 1) * 4]


def batches():
    generator = torch.Generator().manual_seed(1)
    for routes in STEPS:
        x, y = (torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        x[:, 0] = torch.tensor(routes).double()
        yield x, y


def initial():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Experts()


def by_hand(cls, options):
    """Return the weights after each step of a loop on one device, and which parameters have state in the optimizer."""
    model, weights = initial(), []
    optimizer = cls(model.parameters(), **options)
    for x, y in batches():
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        weights.append({fqn: p.detach().clone() for fqn, p in model.named_parameters()})
    return weights, {fqn for fqn, p in model.named_parameters() if p in optimizer.state}


def composed(text, cls, options, *, in_backward=True):
    run = composer3d.compose(initial(), write_manifest(text), loss_fn=mse_loss)
    groups = group_matrices([], matrices_of(run, "weight$")) if cls is Muon else []
    optimizer = run.optimizer(cls, groups=groups, in_backward=in_backward, **options)
    rank, size = run.context.data_parallel_rank, 8 // run.context.data_parallel_degree
    mine, weights = slice(rank * size, (rank + 1) * size), []
    for number, (x, y) in enumerate(batches()):
        with run.step(number):
            run.forward_backward(x[mine], target=y[mine])
            optimizer.step()
            optimizer.zero_grad()
        weights.append({fqn: full(p.detach()).clone() for fqn, p in run.named_parameters()})
    state = {fqn for fqn, p in run.named_parameters() if p in optimizer.state}
    run.close()
    return weights, state


def error(found, wanted):
    return max(
        float((found[fqn] - wanted[fqn]).abs().max() / wanted[fqn].abs().max())
        for found, wanted in zip(found, wanted, strict=True)
        for fqn in wanted
    )


def compared(text, cls, options):
    """Return how far weights are from one device's after any step, and whose state only one of both has."""
    (weights, state), (wanted, known) = composed(text, cls, options), by_hand(cls, options)
    return error(weights, wanted), state ^ known


ADAMW, SGD = (torch.optim.AdamW, OPTIONS), (torch.optim.SGD, {**OPTIONS, "momentum": 0.9})
TABLES = {
    "one device": (1, ""),
    "zero 3": (2, "[sharding.fsdp2]\n"),
    "zero 2": (2, "[sharding.fsdp2]\nzero = 2\n"),
    "zero 1": (2, "[sharding.fsdp2]\nzero = 1\n"),
    "four ranks": (4, "[sharding.fsdp2]\n"),
    "recomputed": (2, '[sharding.fsdp2]\n[scheduling.activation_checkpoint]\nunits = ["experts.*"]\n'),
    "replicas": (2, "[sharding.ddp]\n"),
    "replicas of units": (2, '[sharding.ddp]\nunits = ["experts.*", "leave"]\n'),
    "replicas of shards": (4, "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"),
}


@pytest.mark.parametrize("table", TABLES)
def test_what_no_rank_used_is_not_stepped_and_the_rest_as_on_one_device(table):
    world_size, text = TABLES[table]
    text = f"[train]\nmicrobatch = {8 // world_size}\n{text}"
    for cls, options in (ADAMW, SGD):
        for found, states in run_ranks(compared, world_size, text, cls, options):
            assert states == set()
            assert found < TIGHT


def both(text):
    """Return how far Muon's weights in the backward are from its ordinary step's, and whose state only one has."""
    (weights, state), (wanted, known) = (composed(text, Muon, OPTIONS, in_backward=which) for which in (True, False))
    return error(weights, wanted), state ^ known


@pytest.mark.parametrize("table", ["zero 3", "replicas", "replicas of shards"])
def test_an_optimizer_whose_step_gathers_does_so_on_all_ranks_or_on_none(table):
    world_size, text = TABLES[table]
    for found, states in run_ranks(both, world_size, f"[train]\nmicrobatch = {8 // world_size}\n{text}"):
        assert (found, states) == (0.0, set())


def moved(weights):
    """Return which parameters each step but the first changed."""
    steps = itertools.pairwise(weights)
    return [{fqn for fqn in now if not torch.equal(now[fqn], before[fqn])} for before, now in steps]


def in_bfloat16(text):
    """Return which parameters are changed, or have state, in one of a composition and one device, and how far off."""
    wanted, known = by_hand(*SGD)
    found = []
    for in_backward in (False, True):
        weights, state = composed(text, *SGD, in_backward=in_backward)
        differing = [here ^ there for here, there in zip(moved(weights), moved(wanted), strict=True)]
        found.append((differing, state ^ known, error(weights, wanted)))
    return found


@pytest.mark.parametrize("table", ["zero 3", "replicas"])
def test_mixed_precision_leaves_what_no_rank_used(table):
    world_size, text = TABLES[table]
    text = f"[train]\nmicrobatch = {8 // world_size}\n{text}[precision.mixed]\n"
    for found in run_ranks(in_bfloat16, world_size, text):
        for differing, states, distance in found:
            assert (differing, states) == ([set()] * 3, set())
            assert distance < 2e-2  # bfloat16 has 8 bits, and four steps of 0.1 move weights by a few of their own size
