"""A rank that does not come is named by those that wait, in time."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.models import Net, sum_loss, write_manifest

import composer3d
from composer3d.errors import RendezvousError
from composer3d.processes.arrival import await_all
from composer3d.testing import run_ranks


@pytest.mark.parametrize(
    ("absent", "who"),
    [
        ((2,), "rank 2 of 4 did not join"),
        ((1, 3), "ranks 1, 3 of 4 did not join"),
        (range(1, 12), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more of 12 did not join"),
    ],
)
def test_who_has_not_come_is_named(tmp_path, absent, who):
    world_size = 4 if max(absent) < 4 else 12
    store = dist.FileStore(str(tmp_path / "store"), -1)
    for rank in set(range(1, world_size)) - set(absent):
        store.set(f"composer3d/arrived/join/{rank}", "1")
    with pytest.raises(RendezvousError) as caught:
        await_all(store, place="join", rank=0, world_size=world_size, timeout=timedelta(seconds=0.2))
    they = "it does" if len(absent) == 1 else "they do"
    assert str(caught.value) == f"{who} within 0.2 s, and rank 0 waited; look at what {they}, or raise the timeout"


def test_those_that_came_go_on(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), -1)
    store.set("composer3d/arrived/join/1", "1")
    await_all(store, place="join", rank=0, world_size=2, timeout=timedelta(seconds=60))
    assert store.check(["composer3d/arrived/join/0"])  # and the others need not wait for it


def composing(place):
    """Compose on three ranks, of which the second does not go on at a place; return what the others are told."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()

    class Late(Net):
        def __init__(self):
            super().__init__()
            if rank == 1 and place == "prepare the model":
                store.wait(["released"], timedelta(seconds=100))

    if rank == 1 and place == "give the model its weights":
        from composer3d.composition import assembling

        materialise = assembling.materialise
        assembling.materialise = lambda preparation: (
            store.wait(["released"], timedelta(seconds=100)),
            materialise(preparation),
        )
    try:
        composer3d.compose(Late, write_manifest("[sharding.fsdp2]\n"), loss_fn=sum_loss, timeout_s=10.0)
    except RendezvousError as error:
        if store.add("told", 1) == 2:
            store.set("released", "1")
        return str(error)
    except RuntimeError:
        return ""  # of the rank that was late: the others are gone


@pytest.mark.parametrize("place", ["prepare the model", "give the model its weights"])
def test_a_rank_that_composes_for_too_long_is_named(place):
    first, _, third = run_ranks(composing, 3, place)
    for rank, text in ((0, first), (2, third)):
        waited = f"within 10 s, and rank {rank} waited; look at what it does, or raise the timeout"
        assert text == f"rank 1 of 3 did not {place} {waited}"


def test_a_timeout_bounds_the_collectives_of_every_axis():
    def timeouts():
        run = composer3d.compose(Net, write_manifest("[sharding.fsdp2]\n"), loss_fn=sum_loss, timeout_s=77.0)
        groups = [dist.group.WORLD, run.mesh["dp_shard"].get_group()]
        found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
        run.close()
        return found

    assert run_ranks(timeouts, 2) == [[77.0, 77.0]] * 2
