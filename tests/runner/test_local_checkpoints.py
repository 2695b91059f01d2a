"""States in the memory of nodes: a run that goes on from them is the undisturbed one to the bit, a node lost or not."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict

import pytest
from support.dying_ranks import launched
from support.training import MANIFEST, write

import composer3d
from composer3d import checkpoint
from composer3d.errors import RankError
from composer3d.manifest import load_manifest
from composer3d.runner import TABLES, train
from composer3d.runner.abandoned_states import claim_states
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.testing import run_ranks

KEPT = "[checkpoint]\nevery = 4\nlocal_every = 1\n"
DYING = MANIFEST.replace("microbatch = 2", 'microbatch = 2, loss = "support.dying_ranks:loss"')


def rows(output):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(output / "metrics.jsonl")]


def start(path, folder, *overrides, until=None, nodes=2):
    """Train on two ranks of two nodes, or of one; return the first one's outcome."""
    sets = [f'run.output="{path.parent / "out"}"', f'checkpoint.local_folder="{folder}"', *overrides]

    def rank():
        os.environ["LOCAL_WORLD_SIZE"] = str(2 // nodes)
        os.environ["GROUP_RANK"] = os.environ["RANK"] if nodes == 2 else "0"
        manifest = load_manifest(path, tables=TABLES, overrides=sets)
        return asdict(train(manifest, silent=True, until=until))

    return run_ranks(rank, 2)[0]


def states(folder):
    """Return the files of states by node."""
    found = {}
    for path in sorted(folder.glob("composer3d-local-*/*/*/node-*/*")):
        found.setdefault(path.parent.name, []).append(path.name)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    path = write(folder, MANIFEST + "[ema]\ndecay = 0.9\n" + KEPT)
    start(path, folder, "train.steps=6")
    return rows(folder / "out")


def test_a_node_that_is_lost_takes_back_the_states_that_the_next_one_kept(tmp_path, whole):
    path = write(tmp_path, MANIFEST + "[ema]\ndecay = 0.9\n" + KEPT)
    assert start(path, tmp_path, "train.steps=6", until=5)["step"] == 5
    names = [f"step-{step}-of-2-rank-{rank}" for step in (4, 5) for rank in (0, 1)]
    assert states(tmp_path) == {"node-0": names, "node-1": names}
    assert checkpoint.latest(tmp_path / "out" / "checkpoints").name == "step-4"
    (lost,) = tmp_path.glob("composer3d-local-*/*/*/node-1")
    shutil.rmtree(lost)
    metrics = tmp_path / "out" / "metrics.jsonl"
    kept = metrics.read_text().splitlines(keepends=True)
    assert start(path, tmp_path, "train.steps=6")["status"] == "finished"
    assert metrics.read_text().splitlines(keepends=True)[:5] == kept  # nothing was done again
    assert rows(tmp_path / "out") == whole
    assert states(tmp_path) == {}  # the storage has the end


@pytest.mark.slow
def test_a_rank_that_is_killed_goes_on_from_the_memory_of_its_node(tmp_path):
    path = write(tmp_path, DYING + KEPT)
    folder = f'checkpoint.local_folder="{tmp_path}"'
    _, undisturbed = launched(path, tmp_path / "whole", folder, num_ranks=2)
    ended, found = launched(path, tmp_path / "out", folder, num_ranks=2, max_restarts=1, dies="0:1:7")
    assert ended == {"restarts": 1, "ranks": 2}
    for key in ("step", "loss", "grad_norm"):
        assert [row[key] for row in found] == [row[key] for row in undisturbed]


def test_without_a_state_of_every_rank_the_storage_is_gone_on_from(tmp_path, whole):
    path = write(tmp_path, MANIFEST + "[ema]\ndecay = 0.9\n" + KEPT)
    start(path, tmp_path, "train.steps=6", until=5, nodes=1)
    for lost in tmp_path.glob("composer3d-local-*/*/*/node-0/step-*-rank-1"):
        lost.unlink()
    start(path, tmp_path, "train.steps=6", nodes=1)
    assert rows(tmp_path / "out") == whole


def test_a_damaged_state_is_named(tmp_path):
    path = write(tmp_path, MANIFEST + KEPT)
    start(path, tmp_path, "train.steps=6", until=3, nodes=1)
    (state,) = tmp_path.glob("composer3d-local-*/*/*/node-0/step-3-of-2-rank-1")
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(RankError, match="the states of step 3 in .*: rank 1: damaged: .*; remove that folder"):
        start(path, tmp_path, "train.steps=6", nodes=1)


def test_states_of_another_run_are_left_alone(tmp_path):
    path = write(tmp_path, MANIFEST + KEPT)
    start(path, tmp_path, "train.steps=6", until=3, nodes=1)
    shutil.rmtree(tmp_path / "out")
    start(path, tmp_path, "train.steps=2", nodes=1)
    assert [step for step, *_ in rows(tmp_path / "out")] == [1, 2]


def test_states_whose_run_is_gone_are_removed_by_the_next_one(tmp_path):
    path = write(tmp_path, MANIFEST + KEPT)
    for name in ("gone", "kept", "living"):
        start(path, tmp_path, f'run.output="{tmp_path / name}"', "train.steps=6", until=3, nodes=1)
    bases = {(base / "run").read_text().rpartition("/")[2]: base for base in tmp_path.glob("composer3d-local-*/*")}
    for name in ("gone", "living"):
        shutil.rmtree(tmp_path / name)
    with claim_states(bases["living"], tmp_path / "living"):  # as a rank of it does, which sees that folder elsewhere
        start(path, tmp_path, "train.steps=6", until=3, nodes=1)
    assert [(name, base.exists()) for name, base in bases.items()] == [(name, name != "gone") for name in bases]


def test_half_written_states_of_a_killed_rank_are_removed(tmp_path):
    path = write(tmp_path, MANIFEST + KEPT)
    start(path, tmp_path, "train.steps=6", until=3, nodes=1)
    (node,) = tmp_path.glob("composer3d-local-*/*/*/node-0")
    (node / "step-4-of-2-rank-1.tmp").write_bytes(bytes(100))
    start(path, tmp_path, "train.steps=6", until=4, nodes=1)
    assert not list(node.glob("*.tmp"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local_folder = '/nowhere/at/all'\n", "is no folder of this machine; every node needs it"),
        ("[mesh]\nreplica = 2\n[communication.replicas]\n", "local_every beside replica = 2: a group that is lost"),
    ],
)
def test_what_cannot_be_is_refused(text, message, tmp_path):
    found = composer3d.check(write(tmp_path, MANIFEST + KEPT + text)).problems
    assert [message in problem.message for problem in found] == [True]


def test_a_folder_that_others_may_read_is_refused_by_check(tmp_path):
    (tmp_path / f"composer3d-local-{os.getuid()}").mkdir(mode=0o755)
    text = f"{MANIFEST}{KEPT}local_folder = '{tmp_path}'\n"
    (problem,) = composer3d.check(write(tmp_path, text)).problems
    assert problem.key == "local_folder" and "other users have access (mode 755)" in problem.message
    assert problem.message.endswith("give checkpoint.local_folder another folder, of every node")


def test_a_folder_without_steps_is_refused(tmp_path):
    found = composer3d.check(write(tmp_path, MANIFEST + "[checkpoint]\nlocal_folder = '/tmp'\n")).problems
    assert [problem.message for problem in found] == [
        "local_folder is where local_every keeps states; write local_every = 10 too, or remove it"
    ]
