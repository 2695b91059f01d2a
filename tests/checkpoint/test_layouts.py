"""A run that is moved from layout to layout goes on as one device does, optimizer state included."""

from __future__ import annotations

import logging

import pytest
import torch
from layout_matrix_cells import batch, factory, loss_fn
from support.models import write_manifest

import composer3d
from composer3d.testing import full, run_ranks

PIPELINE = '[scheduling.pipeline]\nschedule = "{}"\n'
TENSOR = "[sharding.tensor_parallel]\nsequence_parallel = true\n"
# Every layout is saved once and loaded once; each is loaded from one that divides the model otherwise.
LAYOUTS = (
    (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"),
    (4, "[mesh]\npp = 2\ntp = 2\n" + PIPELINE.format("1F1B") + TENSOR),
    (2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"),
    (8, "[mesh]\ndp_replicate = 2\ndp_shard = 2\ntp = 2\n[sharding.fsdp2]\n" + TENSOR),
    (4, "[mesh]\npp = 2\ndp_shard = 2\n[sharding.fsdp2]\nzero = 1\n" + PIPELINE.format("ZBVZeroBubble")),
    (2, '[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n'),
    (
        8,
        "[mesh]\npp = 2\ndp_shard = 2\ntp = 2\n[sharding.fsdp2]\nzero = 2\n"
        + PIPELINE.format("Interleaved1F1B")
        + "[sharding.tensor_parallel]\n",
    ),
    (1, ""),
)
FEW = (LAYOUTS[0], (2, "[mesh]\ntp = 2\n" + TENSOR), LAYOUTS[-1])
CP = '[mesh]\ncp = {}\n[sharding.context_parallel]\nmethod = "{}"\n'
# From two ranks of a sequence to four, to one, to two with nobody else averaging, and back to one.
SEQUENCES = (
    (2, CP.format(2, "ring") + "[sharding.fsdp2]\n"),
    (4, CP.format(4, "gather") + "[sharding.fsdp2]\nzero = 2\n"),
    (1, ""),
    (2, CP.format(2, "ulysses")),
    (1, ""),
)


def tensors(run, optimizer):
    """Return weights and optimizer state in full, in the model's order."""
    found = {}
    for fqn, parameter in run.named_parameters():
        found[fqn] = parameter
        found |= {f"{fqn} {key}": value for key, value in optimizer.state.get(parameter, {}).items() if value.dim() > 0}
    return {
        name: run.context.in_model_order(name.partition(" ")[0], full(value)).clone() for name, value in found.items()
    }


def go_on(text, start, steps, load, saves):
    """Load, compare what was loaded with what was saved, train, save; return losses, the state then and before."""
    torch.set_default_dtype(torch.float64)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with composer3d.compose(factory, write_manifest(text + "[train]\nmicrobatch = 4\n"), loss_fn=loss_fn) as run:
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-3)
        if load is not None:
            run.load(load)
        loaded, losses = tensors(run, optimizer), []
        rank, degree = run.context.data_parallel_rank, run.context.data_parallel_degree
        for number in range(start, start + steps):
            inputs, targets = (tensor.chunk(degree)[rank] for tensor in batch(number))
            with run.step(number):
                losses.append(float(run.forward_backward(inputs, target=targets)))
                run.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        if saves is not None:
            run.save(saves)
        return losses, tensors(run, optimizer), loaded


def union(ranks, index):
    return {name: tensor for rank in ranks for name, tensor in rank[index].items()}


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in other)


@pytest.mark.parametrize(
    "layouts", [FEW, pytest.param(LAYOUTS, marks=pytest.mark.slow), SEQUENCES], ids=["few", "all", "sequences"]
)
def test_every_layout_goes_on_from_every_kind_of_other(layouts, tmp_path):
    ((losses, final, _),) = run_ranks(go_on, 1, "", 0, len(layouts), None, None)
    # Weights, and two moments each.
    assert len(final) == 3 * len({name.partition(" ")[0] for name in final})
    before, load = None, None
    for number, (world_size, text) in enumerate(layouts):
        saves = tmp_path / f"step-{number + 1}"
        ranks = run_ranks(go_on, world_size, text, number, 1, load, saves)
        loaded, after = union(ranks, 2), union(ranks, 1)
        if before is not None:
            assert loaded.keys() == before.keys()
            assert all(torch.equal(loaded[name], before[name]) for name in before), text
        for found, *_ in ranks:
            assert abs(found[0] - losses[number]) < 1e-12 * losses[number], text
        before, load = after, saves
    # The last layout is one device, which has come by all others.
    assert distance(before, final) < 1e-12
