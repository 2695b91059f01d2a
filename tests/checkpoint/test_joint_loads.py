"""Loads that one rank finds fault with end on all ranks, and leave them able to load another checkpoint."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch.distributed as dist
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
