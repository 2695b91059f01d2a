"""The machine that knows who takes part in a step is lost: another one takes over, and no step is lost with it."""

from __future__ import annotations

import os
import re
import signal

import pytest
from support.group_nodes import Nodes, await_file, await_text, ending, noting, waiting
from support.group_runs import assert_one_run
from support.process_trees import send_to_tree
from support.replica_groups import STEPS, run_alone

from composer3d.processes.forking import limit_ranks

DATA = "dp_shard = 1\n[train]\nmicrobatch = 1\n[sharding.fsdp2]"
FINISHED = {"outcome": "finished", "failed": None, "restarts": 0, "code": 0}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_alone(tmp_path_factory.mktemp("alone") / "run")


def attempts(nodes):
    return [[(row["step"], row["attempt"]) for row in group] for group in nodes.rows()]


def assert_over(nodes):
    """The run's folder has nothing left that belongs to a run which is served."""
    left = {path.name for path in (nodes.folder / "run").iterdir()}
    assert not {name for name in left if name.startswith((".nodes-", ".lock"))}


def test_where_the_first_machine_is_killed_the_others_go_on_without_a_restart(alone, tmp_path):
    ends = [(1, 0, 0, 2, "before", "node-0 shoot")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=2, text=DATA, ends=ends)
    with limit_ranks(3):
        first, *others = [ending(child) for child in [nodes.start(rank) for rank in range(3)]]
    assert (first, others) == (None, [FINISHED] * 2)
    assert_one_run(nodes.rows(), alone)
    assert attempts(nodes)[1] == attempts(nodes)[2] == [(step, 0) for step in range(STEPS)]
    assert_over(nodes)


@pytest.mark.slow
@pytest.mark.parametrize(("who", "place", "how"), [(1, "after", "shoot"), (2, "after", "slay"), (2, "before", "slay")])
def test_it_may_be_killed_between_the_vote_and_its_answers_with_its_ranks_or_before_them(
    who, place, how, alone, tmp_path
):
    ends = [(who, 0, 0, 3, place, f"node-0 {how}")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=3, text=DATA, ends=ends)
    with limit_ranks(3):
        first, *others = [ending(child) for child in [nodes.start(rank) for rank in range(3)]]
    assert (first, others) == (None, [FINISHED] * 2)
    assert_one_run(nodes.rows(), alone)
    assert attempts(nodes)[1] == attempts(nodes)[2] == [(step, 0) for step in range(STEPS)]


@pytest.mark.slow
def test_the_first_machine_comes_again_as_one_of_the_others_and_takes_over_where_the_second_is_lost(alone, tmp_path):
    # All wait for those that are lost, so that these certainly come back before the end.
    ends = [(1, 0, 0, 2, "before", "node-0 shoot"), (2, 0, 0, 4, "before", "node-1 shoot")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=2, text=DATA, ends=ends, minimum=3)
    with limit_ranks(3):
        first, second, third = [nodes.start(rank) for rank in range(3)]
        assert ending(first) is None
        first = nodes.start(0)
        assert ending(second) is None
        second = nodes.start(1)
        assert [ending(child) for child in (first, second, third)] == [FINISHED | {"restarts": 2}] * 3
    assert_one_run(nodes.rows(), alone)
    assert attempts(nodes) == [
        [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 1)],
        [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1)],
        [(step, 0) for step in range(STEPS)],
    ]
    assert all(row["members"] == [0, 1, 2] for group in nodes.rows() for row in group)
    assert_over(nodes)


@pytest.mark.slow
def test_a_first_machine_with_another_folder_is_refused_where_another_one_serves(alone, tmp_path):
    ends = [(1, 0, 0, 2, "before", "node-0 shoot")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=2, text=DATA, ends=ends, minimum=3)
    with limit_ranks(3):
        first, *others = [nodes.start(rank) for rank in range(3)]
        assert ending(first) is None
        elsewhere = ending(nodes.start(0, output="elsewhere"))
        assert "folder" in elsewhere, elsewhere
        assert [ending(child) for child in (nodes.start(0), *others)] == [FINISHED | {"restarts": 1}] * 3
    assert_one_run(nodes.rows(), alone)
    assert not list((nodes.folder / "elsewhere").glob(".*"))


@pytest.mark.slow
def test_a_first_machine_that_was_stopped_finds_that_others_go_on_and_ends(alone, tmp_path):
    ends = [(1, 0, 0, 2, "before", "node-0 freeze"), (1, 0, 0, 5, "before", "until fenced")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=2, text=DATA, ends=ends, silent_s=4.0)
    with limit_ranks(3):
        first, *others = [nodes.start(rank) for rank in range(3)]
        await_file(nodes.folder / "waits")
        send_to_tree(int((nodes.folder / "node-0.pid").read_text()), signal.SIGCONT)
        found = ending(first)
        (nodes.folder / "fenced").touch()
        assert [ending(child) for child in others] == [FINISHED] * 2
    assert (found["outcome"], found["code"]) == ("failed", os.EX_TEMPFAIL)
    assert re.fullmatch(
        r"this machine, node 0, was taken for lost, and the others go on without it: node 1 \(\S+, pid \d+\) serves "
        r"the run since term 4\ntry: start this machine again with the same command: it takes part again, if the run "
        r"goes on\n",
        found["failed"],
    )
    assert_one_run(nodes.rows(), alone)
    assert not (nodes.folder / "run" / "error.json").exists()  # of a run that has failed on no machine that goes on
    assert_over(nodes)


@pytest.mark.slow
def test_two_of_three_are_lost_at_once_and_the_last_one_computes_all_samples(alone, tmp_path):
    ends = [(2, 0, 0, 2, "before", "node-0 shoot"), (2, 0, 0, 2, "before", "node-1 shoot")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=3, text=DATA, ends=ends, silent_s=5.0)
    with limit_ranks(3):
        *lost, last = [ending(child) for child in [nodes.start(rank) for rank in range(3)]]
    assert (lost, last) == ([None, None], FINISHED)
    assert_one_run(nodes.rows(), alone)
    assert [row["members"] for row in nodes.rows()[2]] == [[0, 1, 2]] * 2 + [[2]] * 4


@pytest.mark.slow
def test_where_all_groups_are_lost_after_a_takeover_they_begin_again(alone, tmp_path):
    ends = [(1, 0, 0, 2, "before", "node-0 shoot")] + [(group, 0, 0, 4, "before", "kill") for group in (1, 2)]
    # The lost machine is waited for as at a run's start.
    options = {"minimum": 2, "max_restarts": 1, "join_s": 5.0}
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=2, text=DATA, ends=ends, **options)
    with limit_ranks(3):
        first, *others = [ending(child) for child in [nodes.start(rank) for rank in range(3)]]
    assert first is None
    assert [(other["outcome"], other["failed"]) for other in others] == [("finished", None)] * 2
    begun = [[row for row in group if row["attempt"] > 0] for group in nodes.rows()]
    assert_one_run(begun, alone)
    assert [row["step"] for row in begun[2]] == list(range(STEPS))


@pytest.mark.slow
def test_sigterm_to_the_machine_that_took_over_ends_the_run_on_all(tmp_path):
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=2, function=waiting)
    with limit_ranks(3):
        first, *others = [nodes.start(rank, before=noting(tmp_path / "log")) for rank in range(3)]
        for each in range(3):
            await_file(nodes.folder / f"there-{each}")
        os.kill(int((nodes.folder / "node-0.pid").read_text()), signal.SIGKILL)
        assert ending(first) is None
        await_text(tmp_path / "log", "knows who takes part in a step from now on")
        os.kill(int((nodes.folder / "node-1.pid").read_text()), signal.SIGTERM)
        found = [ending(child) for child in others]
    assert found == [FINISHED | {"outcome": "preempted"}] * 2
    assert_over(nodes)


@pytest.mark.slow
def test_where_no_machine_is_left_that_may_serve_the_others_end_and_say_so(tmp_path):
    ends = [(2, 0, 0, 2, "before", "node-0 shoot"), (2, 0, 0, 2, "before", "node-1 shoot")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=2, text=DATA, ends=ends, silent_s=1.0)
    with limit_ranks(3):
        *lost, last = [ending(child) for child in [nodes.start(rank) for rank in range(3)]]
    assert lost == [None, None]
    assert (last["outcome"], last["code"]) == ("failed", os.EX_TEMPFAIL)
    assert last["failed"] == (
        f"run failed: node 0, which knows who takes part in a step, is gone: {nodes.endpoint} does not answer\n"
        "try: start all machines again with the same commands: the run goes on from its newest checkpoint\n"
        "no checkpoint was complete\n"
    )
