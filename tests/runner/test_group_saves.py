"""The machine that knows who takes part is killed while its group saves: another one goes on, and saves for it."""

from __future__ import annotations

import json
import os
import signal

import pytest
from support.group_nodes import SECRET, ending, free_endpoint
from support.process_trees import send_to_tree

import composer3d
from composer3d.checkpoint import latest, saving
from composer3d.processes.child import Child
from composer3d.processes.forking import limit_ranks
from composer3d.replicas import TOKEN

STEPS = 8
MANIFEST = f"""\
composer3d = 1
extends = "quickstart"
run.output = "OUT"
train.steps = {STEPS}
model.args.dim = 32
model.args.num_layers = 2
checkpoint.every = 3
mesh.replica = 2
mesh.dp_shard = 1
communication.replicas.silent_s = 60
"""
TOLERANCE = 2e-6  # of float32 sums in another order

pytestmark = pytest.mark.slow


def losses(output):
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def started(manifest, **place):
    """Start a machine; the first one is killed, with its ranks, once the files of a checkpoint are written."""

    def launch():
        os.environ[TOKEN] = SECRET
        pid = os.getpid()
        if place.get("node_rank") == 0:
            saving.publish = lambda path: send_to_tree(pid, signal.SIGKILL)
        return composer3d.run(manifest, **place).to_json()

    return Child(launch)


def test_a_checkpoint_that_the_lost_machine_was_writing_is_none_and_the_next_one_is_anothers(tmp_path):
    endpoint = ",".join(free_endpoint(f"127.0.0.{2 + rank}") for rank in range(2))
    for name in ("run", "alone"):
        (tmp_path / f"{name}.toml").write_text(MANIFEST.replace("OUT", str(tmp_path / name)))
    with limit_ranks(2):
        places = [{"nodes": 2, "node_rank": rank, "endpoint": endpoint} for rank in range(2)]
        first, second = [ending(child) for child in [started(tmp_path / "run.toml", **place) for place in places]]
        assert started(tmp_path / "alone.toml").result()["status"] == "finished"
    assert (first, second["status"], second["exit_code"]) == (None, "finished", 0)
    found, undisturbed = losses(tmp_path / "run"), losses(tmp_path / "alone")
    assert [step for step, _ in found] == [step for step, _ in undisturbed] == list(range(1, STEPS + 1))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in undisturbed], rel=TOLERANCE)
    folder = tmp_path / "run" / "checkpoints"
    assert latest(folder).name == latest(tmp_path / "alone" / "checkpoints").name
    assert not list(folder.glob("*.tmp"))
