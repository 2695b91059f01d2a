"""Several nodes: torchrun's agents on this machine, of which one comes late and is lost, and clocks that disagree."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from support.training import MANIFEST, write

import composer3d
from composer3d.errors import RankError
from composer3d.manifest import load_manifest
from composer3d.processes.forking import limit_ranks
from composer3d.runner import TABLES, train
from composer3d.runner.reporting.clocks import compare_clocks
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.testing import run_ranks

RUN = 'run.device = "cpu"\n'
ELASTIC = MANIFEST.replace(RUN, f'{RUN}run.nodes = "1:2"\n') + "[checkpoint]\nevery = 20\n"
LIMIT_S = 400


@contextmanager
def agent(path, port, *arguments):
    """Start torchrun for one node of one rank; it is killed with its ranks afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=several-nodes"]
    command += ["--rdzv-conf=last_call_timeout=1", "-m", "composer3d", "run", str(path), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        process.kill()
        process.communicate()


def await_line(process, pattern):
    """Read what an agent writes up to a line; fail with all of it where it ends first."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError("".join(lines[-40:]))


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.mark.slow
def test_a_node_comes_late_and_is_lost_and_the_run_is_the_undisturbed_one(tmp_path, port):
    path = write(tmp_path, ELASTIC)
    sets = ("--set", "train.steps=100000", "--set", f'run.output="{tmp_path / "out"}"')
    with limit_ranks(4), agent(path, port, *sets) as first:
        await_line(first, r"training to .* dp_shard=1 ")
        with agent(path, port, *sets) as second:
            await_line(first, r"going on from .* dp_shard=2 ")
            await_line(first, r"step \d+/")
            second.kill()
            await_line(first, r"run failed: ")
        await_line(first, r"going on from .* dp_shard=1 ")
        await_line(first, r"step \d+/")
        first.send_signal(signal.SIGTERM)
        line = await_line(first, r"preempted: \d+ of 100000 steps are done and saved")
    done = int(re.search(r"\d+", line)[0])
    rows = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, done + 1))

    def alone():
        sets = [f'run.output="{tmp_path / "whole"}"', "train.steps=100000"]
        train(load_manifest(path, tables=TABLES, overrides=sets), silent=True, until=done)

    run_ranks(alone, 1, timeout_s=LIMIT_S)
    whole = list(read_metrics(tmp_path / "whole" / "metrics.jsonl"))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=1e-3)


def clocks(path, offsets, nodes):
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = str(len(offsets) // nodes)
    run = composer3d.compose(lambda: torch.nn.Linear(2, 2), path, device="cpu")
    found = compare_clocks(run.context, now=lambda: time.time() + offsets[rank])
    run.close()
    return list(found.values())


@pytest.mark.parametrize(
    ("offsets", "nodes", "expected"),
    [((0, 0, 30), 3, [30.0]), ((0, -12, 0), 3, [-12.0]), ((0, 0), 2, []), ((0, 9), 1, [])],
)
def test_a_clock_that_is_off_is_told(offsets, nodes, expected, tmp_path):
    path = write(tmp_path, "composer3d = 1\n[sharding.fsdp2]\n")
    for found in run_ranks(clocks, len(offsets), path, offsets, nodes):
        assert found == pytest.approx(expected, abs=1.0)


def test_a_node_with_another_manifest_is_named_before_the_first_step(tmp_path):
    path = write(tmp_path)

    def rank():
        os.environ["LOCAL_WORLD_SIZE"], own = "1", f"optimizer.lr=0.0{1 + int(os.environ['RANK'])}"
        sets = [f'run.output="{tmp_path / "out"}"', own]
        train(load_manifest(path, tables=TABLES, overrides=sets), silent=True)

    with pytest.raises(RankError, match="than rank 0: optimizer.lr is 0.02 on rank 1 and 0.01 on rank 0"):
        run_ranks(rank, 2)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
