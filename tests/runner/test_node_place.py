"""Which machine of several this is, and what is refused before any of them starts a rank."""

from __future__ import annotations

import socket

import pytest

import composer3d
from composer3d.cli import main
from composer3d.errors import ComposerError, RendezvousError
from composer3d.replicas import connect, host_and_port, listen, reserve
from composer3d.runner.launching.launcher import LaunchResult
from composer3d.runner.launching.node_messages import result_from_json, result_to_json
from composer3d.runner.launching.node_place import node_place, token_of
from composer3d.runner.reporting.failures import FailureReport

GROUPS = 'composer3d = 1\nextends = "quickstart"\n[mesh]\nreplica = {}\ndp_shard = 1\n[communication.replicas]\n'
HINT = "make one, and set it to the same value on all machines: export COMPOSER3D_QUORUM_TOKEN=$(openssl rand -hex 16)"


def test_groups_are_divided_over_machines_in_order():
    places = [node_place(3, rank, "node0:29400", {}) for rank in range(3)]
    assert [list(place.groups(6)) for place in places] == [[0, 1], [2, 3], [4, 5]]
    assert node_place(None, None, None, {}) is None
    assert node_place(1, 0, "node0:29400", {}) is None  # nothing listens


@pytest.mark.parametrize(
    ("stated", "environment", "message"),
    [
        (
            (2, None, None),
            {},
            "nodes=2: node_rank and endpoint are missing: groups of ranks on several machines are started with nodes "
            "N, node_rank K and endpoint HOST:PORT on each, K from 0 to N - 1",
        ),
        ((2, 2, "node0:29400"), {}, "node_rank=2: 2 machines are numbered from 0 to 1"),
        (
            (2, 0, "node0:29400"),
            {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            "nodes=2: torchrun has started this process as rank 1 of 2; start composer3d run once a machine, without "
            "torchrun",
        ),
        (
            (2, 0, "node0"),
            {},
            'endpoint: "node0" is no HOST:PORT; write the address of the first machine by which the others reach it, '
            "and a free port there: node0:29400, 10.0.0.5:29400 or [fd00::5]:29400",
        ),
        (
            (2, 0, "node0:29400,node1"),
            {},
            'endpoint: "node1" is no HOST:PORT; write the address of the first machine by which the others reach it, '
            "and a free port there: node0:29400, 10.0.0.5:29400 or [fd00::5]:29400",
        ),
        (
            (2, 0, "node0:29400,node0:29400"),
            {},
            "endpoint: node0:29400 stands there twice; give the address of each machine once",
        ),
        (
            (2, 0, "a:1,b:1,c:1"),
            {},
            "endpoint: 3 addresses for 2 machines; give those of machines 0, 1, ... in order",
        ),
    ],
)
def test_places_that_cannot_be(stated, environment, message):
    with pytest.raises(ComposerError) as caught:
        node_place(*stated, environment)
    assert str(caught.value) == message


def test_a_machine_that_may_take_over_has_its_port_and_does_not_listen():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    with reserve(endpoint, node=1) as held:
        with pytest.raises(ConnectionRefusedError):
            connect(endpoint)
        held.listen(1)
        connect(endpoint).close()
        with pytest.raises(RendezvousError, match=rf"{endpoint}: node 2 cannot listen there .*address of node 2's"):
            reserve(endpoint, node=2)


def test_one_process_a_machine_may_be_a_task_of_slurm():
    task = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    assert node_place(2, 1, "node0:29400", task).rank == 1


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, f"COMPOSER3D_QUORUM_TOKEN is not set: who knows it may take part in the run; {HINT}"),
        ("short", f"COMPOSER3D_QUORUM_TOKEN can be guessed, and who knows it may take part in the run; {HINT}"),
        ("0" * 32, f"COMPOSER3D_QUORUM_TOKEN can be guessed, and who knows it may take part in the run; {HINT}"),
    ],
)
def test_a_secret_is_needed(token, message):
    with pytest.raises(ComposerError) as caught:
        token_of({} if token is None else {"COMPOSER3D_QUORUM_TOKEN": token})
    assert str(caught.value) == message


@pytest.mark.parametrize(("degree", "nodes", "nearest"), [(3, 2, "2 or 4"), (2, 4, "4 or 8")])
def test_groups_that_do_not_divide_are_refused(degree, nodes, nearest, tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER3D_QUORUM_TOKEN", "0123456789abcdef0123")
    path = tmp_path / "run.toml"
    path.write_text(GROUPS.format(degree) + f"[train]\nglobal_batch = {8 * degree}\n")
    with pytest.raises(composer3d.ManifestError) as caught:
        composer3d.run(path, nodes=nodes, node_rank=1, endpoint="127.0.0.1:29400")
    assert [(problem.message, problem.hint) for problem in caught.value.problems] == [
        (
            f"replica = {degree}: {degree} groups do not divide over {nodes} machines, and the ranks of a group meet "
            "on one, in a folder and on loopback",
            f"write replica = {nearest}",
        )
    ]


def test_a_manifest_without_groups_is_torchruns(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER3D_QUORUM_TOKEN", "0123456789abcdef0123")
    path = tmp_path / "run.toml"
    path.write_text('composer3d = 1\nextends = "quickstart"\n[mesh]\ndp_shard = 1\n')
    with pytest.raises(composer3d.ManifestError) as caught:
        composer3d.run(path, nodes=2, node_rank=0, endpoint="127.0.0.1:29400")
    assert any(
        problem.message == "--nodes 2: the manifest has no groups of ranks that come and go"
        and problem.hint == "start one world on several machines with torchrun, or add such groups"
        for problem in caught.value.problems
    )


def test_an_endpoint_of_another_machine_is_refused_by_node_0():
    with pytest.raises(RendezvousError) as caught:
        listen("192.0.2.1:29400", backlog=1)
    assert str(caught.value) == (
        "192.0.2.1:29400: node 0 cannot listen there ([Errno 99] Cannot assign requested address); give the address of "
        "node 0's machine by which the others reach it, and a free port"
    )
    assert host_and_port("[fd00::5]:29400") == ("fd00::5", 29400)


def report(rank, text, others=()):
    here = {"world_size": 2, "host": "a", "pid": 1, "time_ns": 2}
    return FailureReport(rank=rank, kind="crash", message=text, traceback=text, others=others, **here)


def test_reports_travel_as_json_of_a_bounded_line():
    small = LaunchResult(outcome="failed", report=report(0, "x", (report(1, "y"),)), num_restarts=2)
    assert result_from_json(result_to_json(small)) == small
    assert result_from_json(result_to_json(LaunchResult(outcome="finished", values={0: {"step": 4}}))).values == {
        0: {"step": 4}
    }
    large = result_to_json(
        LaunchResult(outcome="failed", report=report(0, "x" * 10**6, (report(1, "y" * 10**6),) * 99))
    )
    assert len(str(large)) < 1 << 16
    assert result_from_json(large).report.message.startswith("xxx")


@pytest.mark.parametrize(
    "changed", [{"outcome": "gone"}, {"report": {"rank": "a"}}, {"report": {"rank": 0, "__class__": "os.system"}}]
)
def test_what_is_no_result_is_not_taken_for_one(changed):
    with pytest.raises(ValueError):
        result_from_json(result_to_json(LaunchResult(outcome="finished")) | changed)


def test_a_name_that_is_loopback_on_node_0_alone_is_refused(monkeypatch):
    # As Debian's installer writes /etc/hosts, which the resolver reads first.
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29400))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RendezvousError) as caught:
        listen("node0:29400", backlog=1)
    assert str(caught.value) == (
        'node0:29400: "node0" is 127.0.1.1 on this machine, where no other one reaches it, as /etc/hosts says; '
        "give the address by which the others reach it, or mend that file"
    )


@pytest.mark.parametrize(
    "stated",
    [
        ("--nodes", "2"),
        ("--nodes", "2", "--node-rank", "5", "--endpoint", "127.0.0.1:29400"),
        ("--nodes", "2", "--node-rank", "0", "--endpoint", "127.0.0.1"),
        ("--nodes", "2", "--node-rank", "0", "--endpoint", "127.0.0.1:99999"),
        ("--nodes", "2", "--node-rank", "0", "--endpoint", "127.0.0.1:29400"),  # and no secret
    ],
)
def test_a_wrong_command_line_ends_with_2(stated, monkeypatch, tmp_path):
    for name in ("COMPOSER3D_QUORUM_TOKEN", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run.toml"
    path.write_text(GROUPS.format(2))
    assert main(["run", str(path), *stated]) == 2
