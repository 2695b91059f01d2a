"""float16 with a loss scale on modules that no rank, or only some ranks, call in a step."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import full, run_ranks

HALF = '[precision.mixed]\nparam_dtype = "float16"\ninitial_scale = 256.0\n'
LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\nunits = []\n",
    "ddp": "[sharding.ddp]\n[mesh]\ndp_replicate = 2\n",
}
# Experts that the first and the second half of the samples go to, a step each; the fourth step overflows.
PLAN = [((0, 1, 2), (0, 1, 2)), ((0, 1), (0, 2)), ((0,), (0,)), ((1,), (2,)), ((0,), (1,)), ((2,), (2,))]
OVERFLOWS = 3


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x, chosen):
        h = self.enter(x)
        for index in chosen:
            h = h + self.layers[index](h)
        return self.leave(h)


def batches():
    generator = torch.Generator().manual_seed(1)
    for step in range(len(PLAN)):
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
        if step == OVERFLOWS:
            x[4:] = 1e5  # too large for float16, on the second rank alone
        yield x, y


def one_device(model):
    """Train in float32 with torch alone, without the step that overflows; return losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), []
    for step, (x, y) in enumerate(batches()):
        halves = zip(PLAN[step], x.chunk(2), y.chunk(2), strict=True)
        loss = sum((model(part, chosen) - target).square().mean() for chosen, part, target in halves) / 2
        losses.append(loss.item())
        if step != OVERFLOWS:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def trained(path):
    """Return losses, how far parameters are from one device's, and the idle experts' that have changed."""
    torch.manual_seed(0)
    model = Experts()
    reference = copy.deepcopy(model)
    wanted = one_device(reference)
    run = composer3d.compose(model, path)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    rank, losses, moved = run.context.data_parallel_rank, [], []
    for step, (x, y) in enumerate(batches()):
        before = {fqn: full(p.detach()).clone() for fqn, p in run.named_parameters()}
        mine = slice(4 * rank, 4 * rank + 4)
        losses.append(float(run.backward((run.model(x[mine], PLAN[step][rank]) - y[mine]).square().mean())))
        optimizer.step()
        optimizer.zero_grad()
        called = () if step == OVERFLOWS else {*PLAN[step][0], *PLAN[step][1]}
        idle = tuple(f"layers.{index}." for index in range(3) if index not in called)
        moved += [fqn for fqn, p in run.named_parameters() if fqn.startswith(idle) and not before[fqn].equal(full(p))]
    others = {fqn: full(p.detach()) for fqn, p in run.named_parameters()}
    run.close()
    distance = max(float((others[fqn] - p.detach()).abs().max()) for fqn, p in reference.named_parameters())
    return losses, wanted, distance, moved, {fqn: tensor.tolist() for fqn, tensor in others.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_no_rank_calls_stay_and_an_overflow_in_one_rank_s_skips_the_step(layout):
    found = run_ranks(trained, 2, write_manifest(LAYOUTS[layout] + HALF))
    assert found[0][4] == found[1][4]
    for losses, wanted, distance, moved, _ in found:
        assert moved == []
        assert [loss for step, loss in enumerate(losses) if step != OVERFLOWS] == pytest.approx(
            [loss for step, loss in enumerate(wanted) if step != OVERFLOWS], rel=2e-3
        )
        assert distance < 2e-3  # AdamW moves by 0.01 a step
