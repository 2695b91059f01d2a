"""Values that ranks write into a composed model's parameters: alike, or the next step names who wrote others."""

from __future__ import annotations

import pytest
import torch
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.step.sharded_tensors.written_values import sum_of_words
from composer3d.testing import count_collectives, run_ranks

LAYOUTS = {
    "fsdp2": (2, "[sharding.fsdp2]\n"),
    "ddp": (2, "[sharding.ddp]\n"),
    "tp": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"),
}
HYBRID = (4, "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n")


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 6))


def state(number):
    torch.manual_seed(number)
    return net().state_dict()


def load(run, number):
    run.model.load_state_dict(state(number))


def load_a_module(run, number):
    run.model[1].load_state_dict({"weight": torch.full((8,), number + 1.0), "bias": torch.zeros(8)})


def copy(run, number):
    with torch.no_grad():
        run.model[0].bias.copy_(state(number)["0.bias"])


def copy_data(run, number):
    for parameter, value in zip(run.model[3].parameters(), list(state(number).values())[-2:], strict=True):
        parameter.data.copy_(value)


WAYS = {load: "0.weight", load_a_module: "1.weight", copy: "0.bias", copy_data: "3.weight"}


def step(run, optimizer):
    run.backward(run.model(torch.ones(2, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def said(path, way, of_rank):
    """Train a step, write what is this rank's or the same on all, train again; return what is said."""
    run = composer3d.compose(net(), path)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    step(run, optimizer)
    with count_collectives() as before:
        step(run, optimizer)
    way(run, of_rank[run.context.rank])
    try:
        with count_collectives() as after:
            step(run, optimizer)
    except composer3d.StepError as error:
        return str(error)
    finally:
        run.close()  # which compares replicas
    return after.summary() == before.summary()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_that_differ_between_ranks_are_named_in_the_next_step(layout):
    world_size, text = LAYOUTS[layout]
    for way, fqn in WAYS.items():
        found = run_ranks(said, world_size, write_manifest(text), way, (0, 1))
        assert len(set(found)) == 1 and found[0].startswith("rank 1 (")
        if layout == "tp" and way is copy:  # a plain parameter
            assert f'holds other values than rank 0, its replica, at step 2: parameter "{fqn}"' in found[0]
            continue
        assert f'wrote other values than rank 0 before step 2, into "{fqn}"' in found[0]
        assert found[0].endswith("load the same file, or compute the same values, on all ranks")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_that_ranks_have_in_common_cost_no_collective(layout):
    world_size, text = LAYOUTS[layout]
    assert run_ranks(said, world_size, write_manifest(text), load, (1, 1)) == [True] * world_size


@pytest.mark.slow
def test_replicas_of_shards_are_compared():
    for way, fqn in WAYS.items():
        found = run_ranks(said, 4, write_manifest(HYBRID[1]), way, (0, 0, 1, 0))
        assert "rank 2 (" in found[0] and f'into "{fqn}"' in found[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex64, torch.bool]
)
def test_sums_of_words_follow_each_value_and_no_place_in_memory(dtype):
    torch.manual_seed(0)
    for size in (1, 2, 7, 24):
        values = torch.randn(size, dtype=torch.complex64 if dtype.is_complex else torch.float64).mul(9).to(dtype)
        inside = torch.cat([torch.zeros(3).to(dtype), values])[3:]
        columns = torch.stack([values, torch.zeros_like(values)], 1)[:, 0]
        known = int(sum_of_words(values))
        assert [int(sum_of_words(each)) for each in (inside, columns, values.clone())] == [known] * 3
        for place in range(size):
            other = values.clone()
            other[place] = ~other[place] if dtype is torch.bool else -other[place] if other[place] else 1
            assert int(sum_of_words(other)) != known
