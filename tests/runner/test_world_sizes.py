"""Worlds of several sizes: each is checked before any is started, and a restart on a smaller one is the same run."""

from __future__ import annotations

import pytest
from support.dying_ranks import launched
from support.training import MANIFEST, write

import composer3d
from composer3d.cli import main

ELASTIC = (
    MANIFEST.replace("microbatch = 2", 'microbatch = 2, loss = "support.dying_ranks:loss"')
    + "[checkpoint]\nevery = 2\n"
)
RANGE = 'run.nodes = "1:4"\ntrain = { steps = 1, global_batch = 12 }\n[sharding.fsdp2]\n'


def test_a_restart_on_a_smaller_world_is_the_undisturbed_run(tmp_path):
    path = write(tmp_path, ELASTIC)
    _, whole = launched(path, tmp_path / "whole", num_ranks=1)
    ended, rows = launched(path, tmp_path / "out", num_ranks=2, max_restarts=1, sizes=(1, 2), dies="0:1:7")
    assert ended == {"restarts": 1, "ranks": 1}
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "tokens"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in whole], rel=1e-12)


@pytest.mark.slow
def test_a_layout_of_its_own_for_every_world(tmp_path):
    layouts = "{ 4 = { dp_shard = 2, tp = 2 }, 2 = { dp_shard = 1, pp = 2 } }"
    tables = "[sharding.tensor_parallel]\n[scheduling.pipeline]\n"
    path = write(tmp_path, f"mesh.layouts = {layouts}\n{ELASTIC}{tables}")
    _, whole = launched(path, tmp_path / "whole", "mesh.layouts={1={}}", num_ranks=1)
    ended, rows = launched(path, tmp_path / "out", num_ranks=4, max_restarts=1, sizes=(2, 4), dies="0:3:7")
    assert ended == {"restarts": 1, "ranks": 2}
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=1e-12)


def messages(folder, text, **options):
    path = write(folder, f"composer3d = 1\ndata = 'synthetic'\nrun.device = 'cpu'\n{text}")
    return [problem.message for problem in composer3d.check(path, **options).problems]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", None),
        ("global_batch = 12", "global_batch = 8", "on 3 ranks: a global batch of 8 sequences does not divide into"),
        ('"1:4"', "[1, 2, 4]", None),
        (", global_batch = 12", "", "the run may have several world sizes, and global_batch is not stated: it"),
        ('"1:4"', '"4:1"', 'nodes = "4:1" holds no number: its least is above its most; write "1:4"'),
        ('"1:4"', '"1-4"', 'nodes = "1-4" is no range; write "2:4" for 2, 3 or 4 nodes, or [2, 4] for 2 or 4'),
        ('"1:4"', "0", "nodes are counted from 1 to 65536"),
        ("[sh", "mesh.layouts = { 2 = { tp = 2 } }\n[sh", 'tp = 2, but no plugin of this manifest owns the'),
        ("[sh", "mesh.layouts = { 3 = { dp_shard = 2 } }\n[sh", "on 3 ranks: dp_shard=2, but the world"),
        ("[sh", "mesh.layouts = { 2 = { dp = 2 } }\n[sh", "layouts.2.dp: there is no axis dp; axes are pp,"),
        ("[sh", "mesh.layouts = { two = {} }\n[sh", 'layouts."two" is no number of ranks; write layouts ='),
    ],
)  # fmt: skip
def test_every_stated_world_is_checked(old, new, message, tmp_path):
    found = messages(tmp_path, RANGE.replace(old, new, 1) if old else RANGE)
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_a_world_that_is_not_stated_is_refused(tmp_path):
    text = RANGE.replace('"1:4"', "[1, 2]").replace("[sharding", "mesh.gpus_per_node = 2\n[sharding")
    assert messages(tmp_path, text, world_size=4) == []
    assert messages(tmp_path, text, world_size=3) == [
        "the world has 3 ranks, and a run of this manifest has 2, 4 (2 a node)"
    ]


def test_groups_that_come_and_go_have_one_size(tmp_path):
    found = messages(tmp_path, RANGE.replace("[sharding", "mesh.replica = 2\n[communication.replicas]\n[sharding"))
    assert "several world sizes beside replica = 2: groups have one size" in found


def test_plan_has_a_row_for_every_stated_world(tmp_path, capsys):
    keys = "mesh.layouts = { 2 = {}, 1 = {} }\ncheckpoint.local_every = 2"
    path = write(tmp_path, MANIFEST.replace('run.device = "cpu"', keys))
    assert main(["plan", str(path)]) == 0
    told = capsys.readouterr().out
    rows = told[told.index("every stated world:") :].split("\n")
    assert [row.split()[:4] for row in rows[2:4]] == [["on", "1", "ranks", "1"], ["on", "2", "ranks", "dp_shard=2"]]
    assert "checkpoint.local_every = 2: a rank keeps at most" in told
