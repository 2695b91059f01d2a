"""Compressed means over replicas beside other axes and plugins: each is the same algorithm on one device.

What goes into the exchange is the gradient that the run without compression reduces, what comes out of it is what the
optimizer is given.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.converted_linears import TP_PLAN
from support.models import Even, composed, full, mine, padded, seeded
from support.replicated_gradients import Recorded, power_sgd

from composer3d.runner.objective.muon import Muon, group_matrices, matrices_of
from composer3d.runner.weights.ema import EMA
from composer3d.testing import run_ranks

LOW_RANK = '[communication.compression]\ngradients = "powersgd"\nrank = 1\naxes = ["dp_replicate"]\n'
EXACT = LOW_RANK + "start_step = 1\n"
DDP = "[mesh]\ndp_replicate = 2\n{more}[sharding.ddp]\n"
TENSOR = DDP.format(more="tp = 2\n") + "[sharding.tensor_parallel]\n" + TP_PLAN
STAGES = DDP.format(more="pp = 2\n") + "[scheduling.pipeline]\n[train]\nmicrobatch = 3\n"
MANY, ONE_BY_ONE = "[train]\nmicrobatch = 2\n", "[train]\nmicrobatch = 1\n"
HYBRID = "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
FLOAT8 = DDP.format(more="") + '[precision.float8]\nmodules = ["layers"]\nemulate = true\n'


def stepped(text, *, steps=3, dtype=torch.float64, clip=None, make=None, dim=7):
    """Return a rank's recorded calls, its gradients by step as they are applied, and norms."""
    torch.set_default_dtype(dtype)
    recorded = Recorded()
    recorded.attach(setattr)
    run = composed(text, seeded(Even, dim=dim))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2) if make is None else make(run)
    averages = EMA(run, decay=0.5)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    weights = [{name: full(p.detach()).clone() for name, p in run.named_parameters()}]
    norms, applied = [], []
    for step in range(steps):
        with run.step(step):
            run.forward_backward(tokens, target=targets)
            norms.append(float(run.clip_grad_norm_(math.inf if clip is None else clip)))
            applied.append({name: full(p.grad).clone() for name, p in run.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        averages.update(step)
        weights.append({name: full(p.detach()).clone() for name, p in run.named_parameters()})
    kept = {name: full(tensor) for name, tensor in averages.state_dict()["averages"].items()}
    run.close()
    return recorded.calls, applied, norms, weights, kept


CASES = [
    pytest.param(TENSOR, 4, {}, 1e-12, id="tp"),
    pytest.param(STAGES, 4, {}, 1e-12, id="pp"),
    pytest.param(DDP.format(more="") + MANY, 2, {}, 1e-12, id="accumulation"),
    pytest.param(HYBRID + ONE_BY_ONE, 4, {}, 1e-12, id="accumulation of shards"),
    pytest.param(FLOAT8, 2, {"dtype": torch.float32, "dim": 16}, 1e-4, id="float8"),
]


@pytest.mark.parametrize(("layout", "world_size", "options", "tolerance"), CASES)
def test_what_is_compressed_is_the_gradient_and_what_is_applied_its_product(layout, world_size, options, tolerance):
    compressed = run_ranks(partial(stepped, **options), world_size, layout + LOW_RANK)
    exact = run_ranks(partial(stepped, steps=1, **options), world_size, layout + EXACT)
    calls = [each[0] for each in compressed]
    assert power_sgd(calls, rank=1) < tolerance
    for number, (members, _, reduced) in enumerate(exact[0][0]):
        given = [calls[member][number][1] for member in members]
        for name, mean in reduced.items():
            apart = abs(sum(each[name] for each in given) / len(given) - mean).max() if mean.size else 0.0
            assert apart <= tolerance * max(abs(mean).max() if mean.size else 0.0, 1e-3)


def muon(run):
    return run.optimizer(Muon, groups=group_matrices([], matrices_of(run, None)), lr=1e-3)


def test_clipping_and_averages_are_of_what_is_applied():
    """Norms are those of the means that replicas were given; Muon and moving averages go on from them."""
    layout = DDP.format(more="")
    (calls, applied, norms, weights, kept), other = run_ranks(
        partial(stepped, clip=0.05, make=muon), 2, layout + LOW_RANK
    )
    for step, norm in enumerate(norms):
        means = [
            mean for _, _, after in calls[step * len(calls) // 3 : (step + 1) * len(calls) // 3] for mean in [after]
        ]
        squares = sum(float((tensor**2).sum()) for mean in means for tensor in mean.values())
        assert norm > 0.05 and abs(math.sqrt(squares) - norm) < 1e-12 * norm
        clipped = math.sqrt(sum(float(tensor.square().sum()) for tensor in applied[step].values()))
        assert abs(clipped - 0.05) < 1e-6
    average = weights[0]
    for found in weights[1:]:
        average = {name: 0.5 * tensor + 0.5 * found[name] for name, tensor in average.items()}
    assert all(torch.allclose(kept[name], tensor, rtol=0, atol=1e-12) for name, tensor in average.items())
    assert all(torch.equal(tensor, other[3][-1][name]) for name, tensor in weights[-1].items())
