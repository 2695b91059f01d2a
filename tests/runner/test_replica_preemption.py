"""Slurm's `--signal` beside groups of ranks that come and go: all of them stop after one step, which one has saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from support.training import MANIFEST, write

from composer3d import checkpoint
from composer3d.processes.forking import limit_ranks
from composer3d.runner.reporting.metrics import read_metrics

GROUPS = "[mesh]\nreplica = 2\n[communication.replicas]\n"
LIMIT_S = 120


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_all_groups_save_once_and_stop(number, tmp_path):
    path, output = write(tmp_path, MANIFEST + GROUPS), tmp_path / "out"
    command = [sys.executable, "-m", "composer3d", "run", str(path), "--set", f'run.output="{output}"']
    command += ["--set", "train.steps=100000"]
    with limit_ranks(2):
        process = subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
        )
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            next(line for line in process.stderr if line.startswith("step 1/"))
            process.send_signal(number)
            _, err = process.communicate()
        finally:
            limit.cancel()
            process.kill()
    assert process.returncode == 0, err
    done = [row["step"] for row in read_metrics(output / "metrics.jsonl")]
    assert done == list(range(1, done[-1] + 1))
    assert f"preempted: {done[-1]} of 100000 steps are done and saved\n" in err
    assert checkpoint.latest(output / "checkpoints").name == f"step-{done[-1]}"
