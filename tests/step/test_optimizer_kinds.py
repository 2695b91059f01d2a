"""Groups of plain and sharded parameters: the loop sees one, the step two."""

from __future__ import annotations

import pytest
import torch
from support.models import Even, composed, full, mine, seeded, sum_loss, unpadded

from composer3d import StepError
from composer3d.testing import run_ranks

LAYOUTS = {
    "tp": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"),
    "tp, sequence parallel": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n"),
    "dp_shard x tp": (4, "[mesh]\ndp_shard = 2\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n"),
    "pp": (2, "[mesh]\npp = 2\n[train]\nmicrobatch = 3\n[scheduling.pipeline]\n"),
}
OPTIONS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Counted(torch.optim.Adam):
    """Counts in its groups, as optimizers without schedules do."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class Summed(torch.optim.Adam):
    """Writes a number of its parameters into its groups."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["number"] = len(group["params"])


def train(model, optimizer, scheduler, step):
    for number in range(4):
        if number == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.3
        step(model)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def trained(text, cls, options):
    """Return how many groups there are, their options, and how far weights are from those of one device."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = unpadded(seq_len=6)
    alone = seeded(Even)
    run = composed(text, seeded(Even))
    schedule = [lambda step: 0.9**step]
    optimizer = cls(alone.parameters(), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def step_alone(model):
        total, count = sum_loss(model(tokens), targets)
        (total / count).backward()

    train(alone, optimizer, scheduler, step_alone)
    optimizer = run.optimizer(cls, lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    own = mine(run, tokens), mine(run, targets)
    train(None, optimizer, scheduler, lambda _: run.forward_backward(own[0], target=own[1]))
    wanted = dict(alone.named_parameters())
    error = max(float((full(p.detach()) - wanted[fqn].detach()).abs().max()) for fqn, p in run.named_parameters())
    group = optimizer.param_groups[0]
    return len(optimizer.param_groups), group["lr"], group.get("count"), error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_into_the_one_group_reach_all_parameters(layout):
    world_size, text = LAYOUTS[layout]
    for num_groups, rate, _, error in run_ranks(trained, world_size, text, torch.optim.AdamW, {}):
        assert num_groups == 1 and rate == pytest.approx(1e-2 * 0.9**4, abs=1e-12) and error < 1e-12


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, Counted])
def test_kernels_are_given_one_kind_at_a_time(cls, options):
    for num_groups, _, count, error in run_ranks(trained, 2, LAYOUTS["tp"][1], cls, options):
        assert num_groups == 1 and error < 1e-12
        assert count == (4 if cls is Counted else None)


def summed():
    with pytest.raises(StepError) as caught:
        trained(LAYOUTS["tp"][1], Summed, {})
    return str(caught.value)


def test_what_a_step_computes_of_a_group_of_two_kinds_is_refused():
    for text in run_ranks(summed, 2):
        assert text.startswith('Summed computes "number" of a group from its parameters, and this group has plain ')
