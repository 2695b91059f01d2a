"""Ranks of a training run that end where a test wants them to."""

import os
import signal
import time
from dataclasses import asdict

import torch
import torch.nn.functional as F

from composer3d.manifest import load_manifest
from composer3d.processes.child import Child
from composer3d.processes.forking import limit_ranks
from composer3d.runner import TABLES, train
from composer3d.runner.launching.launcher import launch_local
from composer3d.runner.reporting.metrics import read_metrics

DIES = "DIES_AT"  # restart, rank and micro-batch on that rank, as "0:1:9 1:0:4"
LAME = 6  # micro-batches in which rank 1 is slow
calls = 0


def loss(output, target):
    """Return a sum and its count, as the built-in loss does; a rank whose time has come is killed first."""
    global calls
    calls += 1
    here = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')}:{os.environ.get('RANK')}:{calls}"
    if here in os.environ.get(DIES, "").split():
        os.kill(os.getpid(), signal.SIGKILL)
    summed = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return summed, (target != -100).sum()


def trained(path, overrides, dies=""):
    """Train in float64 as a rank of the local launcher."""
    os.environ[DIES] = dies
    torch.set_default_dtype(torch.float64)
    return asdict(train(load_manifest(path, tables=TABLES, overrides=overrides), silent=True))


def launched(path, output, *overrides, dies="", **options):
    """Train on ranks that are forked; return how many restarts there were, and the rows of metrics."""

    def launch():
        sets = [f'run.output="{output}"', "train.steps=6", *overrides]
        result = launch_local(trained, (str(path), sets, dies), device="cpu", output=output, **options)
        assert result.ok, result.report.render()
        return {"restarts": result.num_restarts, "ranks": len(result.values)}

    with limit_ranks(options["num_ranks"]):
        return Child(launch).result(), list(read_metrics(output / "metrics.jsonl"))


def lame_loss(output, target):
    """Return the loss; rank 1 computes for longer in its first micro-batches than the others do in all of a step."""
    if os.environ.get("RANK") == "1" and calls < LAME:
        end = time.thread_time() + 0.25
        work = torch.ones(64, 64)
        while time.thread_time() < end:
            work = torch.tanh(work @ work)
    return loss(output, target)
