"""Machines started with another list of addresses, or a number that is taken, where another machine serves the run."""

from __future__ import annotations

import os
import re
import signal

import pytest
from support.group_nodes import SECRET, Nodes, await_file, await_text, ending, free_endpoint, noting, read_only, waiting
from support.group_runs import assert_one_run
from support.replica_groups import STEPS, run_alone

import composer3d
from composer3d.errors import PlaceError
from composer3d.processes.forking import limit_ranks
from composer3d.replicas import TOKEN, ReplicaPolicy, listen
from composer3d.runner.launching.node_place import NodePlace
from composer3d.runner.launching.served_run import refuse_served
from composer3d.runner.launching.successor import Successor
from composer3d.runner.launching.terms import MARK, Term, Terms

DATA = "dp_shard = 1\n[train]\nmicrobatch = 1\n[sharding.fsdp2]"


def taken(address, rank):
    """Return the pattern of the refusal of a number that another machine has."""
    there = rf"node {rank} \(\S+, pid \d+\)"
    return (
        rf"{address}: the machine that serves the run refuses this machine: {there} is there already, and {there} has "
        r"the same number: give each machine its own --node-rank"
    )


@pytest.mark.slow
def test_after_a_takeover_machines_with_another_list_or_a_number_that_is_taken_are_told_so(tmp_path):
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=3, function=waiting, silent_s=2.0)
    first, second, third = nodes.endpoint.split(",")
    with limit_ranks(5):
        lost, *others = [nodes.start(rank, before=noting(tmp_path / "log")) for rank in range(3)]
        for each in range(3):
            await_file(nodes.folder / f"there-{each}")
        os.kill(int((nodes.folder / "node-0.pid").read_text()), signal.SIGKILL)
        assert ending(lost) is None
        await_text(tmp_path / "log", "knows who takes part in a step from now on")
        for rank, stated in ((0, [second, first, third]), (0, [first, second]), (2, [first, third, second])):
            refused = ending(nodes.start(rank, endpoint=",".join(stated)))
            assert refused == (
                f"{second}: the machine that serves the run refuses this machine: it was started with --endpoint "
                f"{','.join(stated)}, and node 1 with --endpoint {nodes.endpoint}; give all machines the same list, in "
                "the order of their numbers"
            )
        (nodes.folder / "there-0").unlink()
        another = ",".join((first, second, free_endpoint("127.0.0.9")))
        again = nodes.start(0, endpoint=another, before=noting(tmp_path / "another"))
        await_file(nodes.folder / "there-0")
        for rank in range(3):
            assert re.fullmatch(taken(second, rank), ending(nodes.start(rank, endpoint=nodes.endpoint)))
        (nodes.folder / "release").touch()
        assert [ending(child)["outcome"] for child in (again, *others)] == ["finished"] * 3
    assert (
        f"was started with --endpoint {another}, and node 1 with {nodes.endpoint}\n"
        in (tmp_path / "another").read_text()
    )
    assert "is lost: this group is not let into the run" not in (tmp_path / "log").read_text()


def test_a_list_of_one_is_told_who_serves_and_where(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    manifest = tmp_path / "run.toml"
    manifest.write_text(f'composer3d = 1\nextends = "quickstart"\nrun.output = "{tmp_path}"\n')
    place = NodePlace(count=3, rank=0, endpoint=free_endpoint())
    refuse_served(place, tmp_path)
    address = free_endpoint("127.0.0.3")
    (tmp_path / f"{MARK}x").mkdir()
    term = Term(number=1, node=1, name="host, pid 7", members={}, address=address)
    assert Terms(tmp_path / f"{MARK}x").claim(term)
    refuse_served(place, tmp_path)  # of a run that was killed
    with listen(address, backlog=1), pytest.raises(PlaceError) as caught:
        composer3d.run(manifest, nodes=3, node_rank=0, endpoint=place.endpoint)
    assert str(caught.value) == (
        f"--endpoint {place.endpoint}: node 1 (host, pid 7) serves the run since term 1, at {address}; give this "
        "machine the list of addresses that the others have, in the order of their numbers"
    )


def test_one_whose_address_the_others_do_not_have_asks_who_serves_and_does_not_take_over(tmp_path):
    own, served, *others = [free_endpoint(f"127.0.0.{2 + each}") for each in range(4)]
    folder = tmp_path / f"{MARK}x"
    folder.mkdir()
    assert Terms(folder).claim(Term(number=1, node=1, name="host, pid 7", members={0: "x"}, address=served))
    place = NodePlace(count=3, rank=0, endpoint=",".join((own, *others)))
    successor = Successor(place, ReplicaPolicy(), tmp_path)
    try:
        assert [successor.next_address()[0] for _ in range(3)] == [served, *others]
        assert successor.socket is not None
        welcome = {"mark": folder.name, "node": 1, "term": 1, "endpoints": ["127.0.0.6:1", served, others[1]]}
        successor.welcomed(welcome, tmp_path)
        assert successor.socket is None
        successor.lost()
        assert [successor.next_address()[0] for _ in range(3)] == [others[1], served, others[0]]
        assert successor.claim() is None and Terms(folder).after(1) is None
    finally:
        successor.close()


@pytest.mark.slow
def test_a_machine_that_cannot_write_to_the_folder_leaves_taking_over_to_the_next_one(tmp_path):
    alone = run_alone(tmp_path / "alone")
    ends = [(1, 0, 0, 2, "before", "node-0 shoot")]
    nodes = Nodes(tmp_path / "run", count=3, groups=3, servers=3, text=DATA, ends=ends, silent_s=5.0)
    (nodes.folder / "run").mkdir()
    before = {0: None, 1: read_only(nodes.folder / "run", tmp_path / "log"), 2: None}
    with limit_ranks(3):
        first, *others = [ending(child) for child in [nodes.start(rank, before=before[rank]) for rank in range(3)]]
    if "no mounts" in (tmp_path / "log").read_text():
        pytest.skip("needs to mount, as root")
    assert (first, [other["outcome"] for other in others]) == (None, ["finished"] * 2)
    assert_one_run(nodes.rows(), alone)
    assert [row["attempt"] for row in nodes.rows()[1]] == [0] * STEPS
    assert "this machine, node 1, cannot take over: [Errno 30] Read-only file system" in (tmp_path / "log").read_text()
