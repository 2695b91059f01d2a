"""Loads that one rank finds fault with end on all ranks, and leave them able to load another checkpoint."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from support.damaged_checkpoints import reseal
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d import CheckpointError
from composer3d.testing import run_ranks

LAYOUTS = {"zero 3": "[sharding.fsdp2]\n", "ddp": "[sharding.ddp]\n[mesh]\ndp_replicate = 2\n"}


def loads(text, folder):
    """Load a truncated checkpoint, then the one before it; return what the first says, and the weights' errors."""
    run = composer3d.compose(nn.Linear(6, 3), write_manifest(text))
    run.save(folder / "old")
    kept = [run.full_tensor(fqn, each.detach()) for fqn, each in run.named_parameters()]
    if dist.get_rank() == 0:
        shutil.copytree(folder / "old", folder / "new")
        file = folder / "new" / "__0_0.distcp"
        os.truncate(file, file.stat().st_size * 2 // 3)
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        run.load(folder / "new")
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.load(folder / "old")
    found = [run.full_tensor(fqn, each.detach()) for fqn, each in run.named_parameters()]
    run.close()
    return str(caught.value), all(torch.equal(*pair) for pair in zip(kept, found, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_truncated_checkpoint_is_refused_on_all_ranks_and_the_one_before_it_loads(layout, tmp_path):
    (one, is_first_loaded), (other, is_second_loaded) = run_ranks(loads, 2, LAYOUTS[layout], tmp_path)
    assert one == other and "__0_0.distcp: damaged: it has " in one
    assert is_first_loaded and is_second_loaded


class Tally:
    """What a loop attaches, whose number it insists upon."""

    def __init__(self):
        self.seen = 3

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"] + (0 if self.seen is not None else "")


def truncated(name):
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def without(name):
    return lambda path: (path / name).unlink()


def rewritten(**changes):
    def damage(path):
        content = json.loads((path / "state.json").read_text())
        content["state"].update(changes)
        (path / "state.json").write_text(json.dumps(content))
        reseal(path, "state.json")

    return damage


# Damage that one rank alone sees on a disk of its own: which rank that is, and what the error says.
DAMAGE = {
    "no folder": (shutil.rmtree, 1, "there is no checkpoint here"),
    "no folder, the first": (shutil.rmtree, 0, "there is no checkpoint here"),
    "no state": (without("state.json"), 1, "state.json is missing"),
    "no state, the first": (without("state.json"), 0, "state.json is missing"),
    "no digests": (without("checksums.json"), 1, "checksums.json: missing"),
    "half a state": (truncated("state.json"), 1, "damaged"),
    "another form": (rewritten(next_step="x"), 1, "state.next_step"),
    "another step": (rewritten(next_step=7), 1, "sees another state.json here than rank 0"),
    "no optimizer": (rewritten(optimizer=None), 1, "sees another state.json here than rank 0"),
    "half an index": (truncated(".metadata"), 1, "damaged"),
    "half a shard": (truncated("__1_0.distcp"), 1, "__1_0.distcp: damaged"),
}


def start():
    torch.manual_seed(0)
    run = composer3d.compose(nn.Linear(6, 3), write_manifest(LAYOUTS["zero 3"]))
    optimizer, tally = run.optimizer(torch.optim.AdamW, lr=0.1), Tally()
    run.attach("tally", tally)
    return run, optimizer, tally


def loads_of_own_disks(folder):
    """Load what each rank sees on a disk of its own; return the errors by case, and what a whole one loads after."""
    run, optimizer, tally = start()
    run.backward(run.model(torch.ones(2, 6)).sum())
    optimizer.step()
    run.save(folder / "whole")
    rank, found = dist.get_rank(), {}
    for number, (name, (damage, where, _)) in enumerate(DAMAGE.items()):
        own = folder / f"disk-{rank}" / str(number)
        shutil.copytree(folder / "whole", own)
        if rank == where:
            damage(own)
        with pytest.raises(CheckpointError) as caught:
            run.load(own)
        found[name] = str(caught.value)
    tally.seen = 0
    run.load(folder / "whole")
    run.close()
    return found, tally.seen


def test_damage_that_one_rank_alone_sees_ends_the_load_on_all(tmp_path):
    (one, first_tally), (other, second_tally) = run_ranks(loads_of_own_disks, 2, tmp_path)
    for name, (_, where, text) in DAMAGE.items():
        for message in (one[name], other[name]):
            # Where the newest one is, the first rank says for all.
            assert text in message and (where == 0 or "rank 1" in message), (name, message)
    assert first_tally == second_tally == 3


def loads_into_other_ranks(folder):
    """Load a whole checkpoint where the second rank's objects do not take it; return the errors."""
    run, optimizer, tally = start()
    run.save(folder / "whole")
    is_second, found, group = dist.get_rank() == 1, [], optimizer.param_groups[0]

    def refused():
        with pytest.raises(CheckpointError) as caught:
            run.load(folder / "whole")
        found.append(str(caught.value))

    if is_second:
        group["lr"] = [0.1]
    refused()
    group["lr"], tally.seen = 0.1, None if is_second else 0
    refused()
    tally.seen = 0
    if is_second:
        run.attach("more", Tally())
    refused()
    run.close()
    return found


def test_a_rank_that_does_not_take_a_state_ends_the_load_on_all(tmp_path):
    one, other = run_ranks(loads_into_other_ranks, 2, tmp_path)
    rate, state, more = one
    assert one == other
    assert "ranks differ: lr is 0.1 and [0.1]" in rate
    assert 'rank 1: the state "attached/tally" is not one that its owner takes: TypeError: ' in state
    assert 'rank 1: holds no state "attached/more", which this run has' in more


def newest_of_own_disks(folder):
    """Load the newest checkpoint where the first rank does not see the last one yet; return what was loaded."""
    run, _, tally = start()
    rank = dist.get_rank()
    for step in (1, 2):
        tally.seen = step
        run.save(folder / "shared" / f"step-{step}")
        if step == 1 or rank == 1:
            shutil.copytree(folder / "shared", folder / f"disk-{rank}", dirs_exist_ok=True)
    run.load(folder / f"disk-{rank}")
    run.close()
    return tally.seen


def test_ranks_load_what_the_first_of_them_sees_as_the_newest(tmp_path):
    assert run_ranks(newest_of_own_disks, 2, tmp_path) == [1, 1]
