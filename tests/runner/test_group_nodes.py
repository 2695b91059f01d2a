"""Groups of ranks on several machines: whoever is lost and comes back, the run is that of one device."""

from __future__ import annotations

import os
import re
import signal

import pytest
from support.group_nodes import FINGERPRINT, Nodes, await_file, continuing, ending, linked_networks, noting, waiting
from support.group_runs import assert_one_run
from support.replica_groups import STEPS, run_alone
from support.sockets import watched_listeners

from composer3d.processes.forking import limit_ranks
from composer3d.replicas import connect

DATA = "dp_shard = 1\n[train]\nmicrobatch = 1\n[sharding.fsdp2]"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_alone(tmp_path_factory.mktemp("alone") / "run")


def test_a_rank_and_a_machine_are_killed_and_come_again_and_the_run_is_one_devices(alone, tmp_path):
    # Node 0 waits for them, so that they certainly come back before the end.
    ends = [(1, 0, 0, 2, "before", "kill"), (1, 1, 0, 4, "before", "node-1 kill")]
    nodes = Nodes(tmp_path / "run", text=DATA, ends=ends, minimum=2)
    with limit_ranks(2):
        first, second = nodes.start(0), nodes.start(1)
        assert ending(second) is None
        again = ending(nodes.start(1))
    assert again == ending(first) == {"outcome": "finished", "failed": None, "restarts": 2, "code": 0}
    found = nodes.rows()
    assert_one_run(found, alone)
    assert [(row["step"], row["attempt"]) for row in found[1]] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert all(row["members"] == [0, 1] for group in found for row in group)


def test_machines_that_are_none_of_the_run_are_refused_by_name(tmp_path):
    nodes = Nodes(tmp_path / "run", function=waiting)
    with limit_ranks(2):
        first = nodes.start(0)
        await_file(nodes.folder / "there-0")
        strangers = [connect(nodes.endpoint) for _ in range(3)]
        for stranger, data in zip(strangers, (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95" * 9000, b""), strict=True):
            stranger.sendall(data)
        older = {"composer3d": "0", "manifest": FINGERPRINT["manifest"]}
        refused = [
            ending(nodes.start(1, **options))
            for options in (
                {"token": "0123456789abcdef0123"},
                {"fingerprint": older},
                {"fingerprint": FINGERPRINT | {"manifest": "b" * 64}},
                {"count": 3},
            )
        ]
        (nodes.folder / "release").touch()
        assert ending(first)["outcome"] == "finished"
    for stranger in strangers:
        stranger.close()
    assert refused == [
        f"{nodes.endpoint}: the connection was ended without an answer: either COMPOSER3D_QUORUM_TOKEN is not that of "
        "node 0, or this is not the --endpoint of node 0",
        f"{nodes.endpoint}: node 0 refuses this machine: it has composer3d 0, and node 0 has 1; install the same on "
        "all machines",
        f"{nodes.endpoint}: node 0 refuses this machine: it has another manifest than node 0 (digest bbbbbbbbbbbb, not "
        "aaaaaaaaaaaa); give all machines the same file and the same --set",
        f"{nodes.endpoint}: node 0 refuses this machine: it was started with --nodes 3, and node 0 with --nodes 2",
    ]


@pytest.mark.slow
def test_a_machine_with_a_folder_of_its_own_or_the_number_of_another_is_refused(tmp_path):
    nodes = Nodes(tmp_path / "run", function=waiting, silent_s=2.0)
    with limit_ranks(4):
        first = nodes.start(0)
        elsewhere = ending(nodes.start(1, output="elsewhere"))
        second = nodes.start(1)
        await_file(nodes.folder / "there-1")
        twice = ending(nodes.start(1))
        (nodes.folder / "release").touch()
        assert ending(first)["outcome"] == ending(second)["outcome"] == "finished"
    assert elsewhere == (
        f"{nodes.folder / 'elsewhere'} is not the folder that node 0 writes to: of groups on several machines it must "
        "be on a disk that all of them share; give run.output a path that all machines have alike"
    )
    assert re.fullmatch(
        rf"{nodes.endpoint}: node 0 refuses this machine: node 1 \(\S+, pid \d+\) is there already, and node 1 \(\S+, "
        r"pid \d+\) has the same number: give each machine its own --node-rank",
        twice,
    )


@pytest.mark.slow
def test_a_machine_that_was_stopped_is_given_up_and_comes_again(alone, tmp_path):
    ends = [(1, 0, 0, 2, "before", "node-1 stop")]
    nodes = Nodes(tmp_path / "run", text=DATA, ends=ends, minimum=2, silent_s=8.0)
    with limit_ranks(2):
        children = nodes.start(0, before=continuing(nodes.folder, 1)), nodes.start(1)
        assert [ending(child)["failed"] for child in children] == [None, None]
    found = nodes.rows()
    assert_one_run(found, alone)
    assert [row["attempt"] for row in found[1]] == [0, 0, 1, 1, 1, 1]


@pytest.mark.slow
def test_of_three_machines_one_is_killed_and_one_leaves_and_the_last_computes_all_samples(alone, tmp_path):
    ends = [(1, 0, 0, 2, "before", "node-1 kill"), (2, 0, 0, 4, "before", "node-2 term")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, text=DATA, ends=ends)
    with limit_ranks(3):
        children = [nodes.start(rank) for rank in (1, 2, 0)]  # those that wait for node 0 first
        second, third, first = (ending(child) for child in children)
    assert (second, first["outcome"], third["outcome"], third["code"]) == (
        None,
        "finished",
        "preempted",
        os.EX_TEMPFAIL,
    )
    assert_one_run(nodes.rows(), alone)
    assert nodes.rows()[0][2]["members"] == [0, 2]


@pytest.mark.slow
def test_where_node_0_is_killed_all_machines_end_and_say_so(tmp_path):
    ends = [(1, 0, 0, 2, "before", "node-0 kill")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, text=DATA, ends=ends)
    with limit_ranks(3):
        first, *others = [ending(child) for child in [nodes.start(rank) for rank in range(3)]]
    assert first is None
    for other in others:
        assert (other["outcome"], other["code"]) == ("failed", os.EX_TEMPFAIL)
        assert other["failed"] == (
            f"run failed: node 0, which knows who takes part in a step, is gone: {nodes.endpoint} does not answer\n"
            "try: start all machines again with the same commands: the run goes on from its newest checkpoint\n"
            "no checkpoint was complete\n"
        )


@pytest.mark.slow
def test_machines_in_networks_of_their_own_exchange_over_the_link_between_them(alone, tmp_path):
    ends = [(1, 0, 1, 2, "before", "kill"), (0, 0, 1, 4, "after", "kill")]
    text = "dp_shard = 2\n[train]\nmicrobatch = 1\n[sharding.fsdp2]"
    options = {"groups": 2, "ranks": 2, "endpoint": "10.203.0.1:29400"}
    with linked_networks() as enter, limit_ranks(4):
        if enter is None:
            pytest.skip("needs to make networks: ip netns, as root")
        nodes = Nodes(tmp_path / "run", text=text, ends=ends, minimum=2, **options)
        with watched_listeners() as seen:
            children = [nodes.start(rank, before=enter[rank]) for rank in range(2)]
            assert [ending(child)["failed"] for child in children] == [None, None]
    assert_one_run(nodes.rows(), alone)
    assert seen == {"127.0.0.1", "10.203.0.1", "10.203.0.2"}  # ranks of a group, and of several


def sent(nodes, rank, number, before=None):
    """Start two machines whose ranks wait, send one of them a signal, and return how they end."""
    with limit_ranks(2):
        children = [nodes.start(0, before=before), nodes.start(1)]
        for each in range(2):
            await_file(nodes.folder / f"there-{each}")
        os.kill(int((nodes.folder / f"node-{rank}.pid").read_text()), number)
        return [ending(child) for child in children]


@pytest.mark.slow
def test_a_machine_that_may_not_leave_ends_the_run_on_all_machines_and_node_0_says_why(tmp_path):
    nodes = Nodes(tmp_path / "run", function=waiting, minimum=2)
    first, second = sent(nodes, 1, signal.SIGTERM, before=noting(tmp_path / "log"))
    assert first == second == {"outcome": "preempted", "failed": None, "restarts": 0, "code": 0}
    assert re.search(
        r"node 1 \(\S+, pid \d+\) was asked to stop; without its groups 0 would be left, and a step needs 2: the "
        r"run is saved, and stops on all machines\n",
        (tmp_path / "log").read_text(),
    )


@pytest.mark.slow
def test_ctrl_c_on_node_0_ends_all_machines_with_one_report(tmp_path):
    nodes = Nodes(tmp_path / "run", function=waiting)
    first, second = sent(nodes, 0, signal.SIGINT)
    assert (first["outcome"], first["code"]) == ("interrupted", 3)
    assert second == first


@pytest.mark.slow
def test_where_the_groups_of_all_machines_are_lost_they_begin_again(alone, tmp_path):
    ends = [(0, 0, 0, 2, "before", "kill"), (1, 0, 0, 2, "before", "kill")]
    nodes = Nodes(tmp_path / "run", text=DATA, ends=ends, minimum=2, max_restarts=1)
    with limit_ranks(2):
        children = [nodes.start(rank) for rank in range(2)]
        assert [ending(child)["failed"] for child in children] == [None, None]
    begun = [[row for row in group if row["attempt"] > 0] for group in nodes.rows()]
    assert_one_run(begun, alone)
    assert [row["step"] for row in begun[1]] == list(range(STEPS))
