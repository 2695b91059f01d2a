"""Gradients that a loop writes into: alike on all ranks, or the next step names what one of them wrote."""

from __future__ import annotations

import pytest
import torch
from support.models import composed, mean_loss, mine, unpadded

from composer3d import StepError
from composer3d.testing import count_collectives, run_ranks

LAYOUTS = {
    "ddp": (2, "[sharding.ddp]\n"),
    "buckets": (2, '[sharding.ddp]\nreducer = "bucketed"\n'),
    "zero 3": (2, "[sharding.fsdp2]\n"),
    "zero 2": (2, "[sharding.fsdp2]\nzero = 2\n"),
    "zero 1": (4, "[sharding.fsdp2]\nzero = 1\n"),
}
FQN = "layers.0.up.bias"


def scale(parameter):
    parameter.grad.mul_(0.5)


def clear(parameter):
    parameter.grad.zero_()


def scale_shard(parameter):
    getattr(parameter.grad, "_local_tensor", parameter.grad).mul_(0.5)


def replace(parameter):
    parameter.grad = parameter.grad * 0.5


def drop(parameter):
    parameter.grad = None


def said(text, write, ranks, is_clipped):
    """Train steps, in one of which some ranks write into a gradient; return what is said, or whether that is free."""
    run = composed(text)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in unpadded(8))
    counted = []
    try:
        for number in range(4):
            with count_collectives() as collectives:
                run.backward(mean_loss(run.model(tokens), targets))
                if is_clipped:
                    run.clip_grad_norm_(0.01)
                if number == 2 and run.context.rank in ranks:
                    write(dict(run.named_parameters())[FQN])
                optimizer.step()
                optimizer.zero_grad()
            counted.append(collectives.summary())
    except StepError as error:
        return str(error)
    finally:
        run.close()
    return counted[2] == counted[3]  # buckets are made anew after the first step


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("write", "is_clipped"), [(scale, False), (clear, True), (replace, True), (drop, False)])
def test_a_gradient_that_one_rank_changes_is_named_in_the_next_step(layout, write, is_clipped):
    world_size, text = LAYOUTS[layout]
    for message in run_ranks(said, world_size, text, write, (1,), is_clipped):
        assert message.startswith("the loop of rank 1 (")
        assert message.endswith(
            f'before step 3: writes into the gradient of "{FQN}" after its last backward: 1, not 0; all ranks must '
            "decide alike"
        )


@pytest.mark.parametrize("layout", ["ddp", "zero 3"])
def test_a_shard_that_one_rank_changes_is_named_with_what_shares_its_memory(layout):
    world_size, text = LAYOUTS[layout]
    for message in run_ranks(said, world_size, text, scale_shard, (1,), False):
        assert f'writes into the gradient of "{FQN}" after its last backward: 1, not 0' in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_all_ranks_change_are_the_loops_own_choice_and_add_no_collective(layout):
    world_size, text = LAYOUTS[layout]
    for write, is_clipped in ((scale, False), (replace, True)):
        assert run_ranks(said, world_size, text, write, range(world_size), is_clipped) == [True] * world_size


def nudge(parameter):
    with torch.no_grad():
        parameter.add_(0.01)


def overwrite(parameter):
    with torch.no_grad():
        parameter.copy_(torch.full(parameter.shape, 0.5))


def nudge_shard(parameter):
    getattr(parameter, "_local_tensor", parameter).detach().mul_(1.5)


def nudge_data(parameter):
    parameter.data.add_(0.01)


def clip_data(parameter):
    """Change one element of the whole, which one rank has."""
    parameter.data.clamp_(max=parameter.detach().full_tensor().max().item() * 0.999)


@torch.no_grad()
def clip_data_without_gradients(parameter):
    clip_data(parameter)


def told(text, write, ranks, at=4):
    """Train steps, between two of which some ranks write into a weight; return what is said."""
    run = composed(text)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in unpadded(8))
    try:
        for number in range(8):
            run.backward(mean_loss(run.model(tokens), targets))
            optimizer.step()
            optimizer.zero_grad()
            if number == at and run.context.rank in ranks:
                write(dict(run.named_parameters())[FQN])
    except StepError as error:
        return str(error)
    finally:
        run.close()
    return ""


@pytest.mark.parametrize("layout", ["zero 3", "zero 2"])
@pytest.mark.parametrize("write", [nudge, nudge_shard])
def test_a_weight_whose_shard_one_rank_writes_is_named_in_the_next_step(layout, write):
    world_size, text = LAYOUTS[layout]
    for message in run_ranks(told, world_size, text, write, (1,)):
        assert "decided something else than that of rank 0 before step 5: " in message
        assert f'writes between steps into the shards of "{FQN}": 1, not 0' in message


def test_a_shard_that_one_rank_writes_through_data_is_named_where_values_are_compared():
    world_size, text = LAYOUTS["zero 3"]
    for message in run_ranks(told, world_size, text, nudge_data, (1,), 2):
        assert "decided something else than that of rank 0 before step 3: " in message
        assert f'writes between steps into the shards of "{FQN}": 1, not 0' in message


@pytest.mark.parametrize("layout", ["zero 3", "zero 1"])
def test_a_weight_that_all_ranks_write_is_the_loops_own_choice(layout):
    world_size, text = LAYOUTS[layout]
    for write in (nudge, overwrite, clip_data, clip_data_without_gradients):
        assert run_ranks(told, world_size, text, write, range(world_size), 2) == [""] * world_size
