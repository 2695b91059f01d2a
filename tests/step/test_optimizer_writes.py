"""Optimizer state that a loop writes into: alike on all ranks, or the next step names what one of them wrote."""

from __future__ import annotations

import pytest
import torch
from support.models import composed, seeded, unpadded
from torch import nn

from composer3d import StepError
from composer3d.testing import count_collectives, run_ranks

LAYOUTS = {
    "fsdp2": (2, "[sharding.fsdp2]\n"),
    "ddp": (2, "[sharding.ddp]\n"),
    "tp": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))


def scale(optimizer, parameter, key):
    optimizer.state[parameter][key].mul_(2.0)


def scale_data(optimizer, parameter, key):
    value = optimizer.state[parameter][key]
    getattr(value, "_local_tensor", value).add_(1.0)


def replace(optimizer, parameter, key):
    optimizer.state[parameter][key] = optimizer.state[parameter][key] * 2.0


def step(run, optimizer):
    run.backward(run.model(torch.ones(2, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def said(text, write, key, ranks):
    """Train a step, write into one state on some ranks, and train again; return what is said, or whether that is free.

    Args:
        text: Manifest.
        write: Changes a state.
        key: Of the state.
        ranks: That change it.
    """
    run = composed(text, net(), loss_fn=None)
    optimizer = run.optimizer(torch.optim.Adam, lr=0.1)
    step(run, optimizer)
    with count_collectives() as before:
        step(run, optimizer)
    if run.context.rank in ranks:
        write(optimizer, optimizer.param_groups[0]["params"][0], key)
    try:
        with count_collectives() as after:
            step(run, optimizer)
    except StepError as error:
        return str(error)
    finally:
        run.close()
    return before.summary() == after.summary()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("key", "write"), [("exp_avg", scale), ("exp_avg_sq", scale), ("exp_avg", scale_data), ("exp_avg", replace)]
)
def test_a_state_that_one_rank_changes_is_named_in_the_next_step(layout, key, write):
    world_size, text = LAYOUTS[layout]
    for message in run_ranks(said, world_size, text, write, key, (1,)):
        assert message.startswith("the loop of rank 1 (")
        what = f'writes between steps into the optimizer\'s "{key}" of "0.0.weight": 1, not 0'
        assert f"{what}; all ranks must decide alike" in message


@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_a_state_that_all_ranks_change_is_the_loops_own_choice_and_adds_no_collective(layout):
    world_size, text = LAYOUTS[layout]
    assert run_ranks(said, world_size, text, scale, "exp_avg", (0, 1)) == [True, True]


def loaded(path):
    """Save, load and step: what a checkpoint writes, into shards of any size, is nobody's write."""
    run = composed("[sharding.fsdp2]\n", seeded())
    optimizer = run.optimizer(torch.optim.Adam, lr=0.1)
    tokens, targets = unpadded()
    for number in range(3):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            run.save(path)
            run.load(path)
    run.close()
    return True


def test_states_of_a_checkpoint_are_no_writes(tmp_path):
    assert run_ranks(loaded, 4, tmp_path / "saved") == [True] * 4
