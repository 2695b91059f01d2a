"""A run that torchrun started, and what doctor says of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.doctor_cases import lines, write


@pytest.mark.slow
def test_a_rank_that_was_killed_under_torchrun(folder, capfd):
    write("killed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "composer3d"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "run", "run.toml"], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode != 0
    shown, found = lines(capfd)
    assert found["rank"] == 1
    assert shown[0].startswith("rank 1 (dp_shard 1) on ") and shown[0].endswith("in step 3"), shown
    # torchrun alone sees the signal: the other rank is what says where the first was.
    assert "was killed" in shown[0] and "did not come through all_gather of [36], in which rank 0 waited" in shown[1]
    assert shown[2].startswith("  rank 0 (dp_shard 0): in step 3, in forward")
