"""The server of the membership takes nothing from those who are none of the run, and notices those that fall silent."""

from __future__ import annotations

import json
import socket
import time

import pytest

from composer3d.replicas import QuorumServer, ReplicaPolicy


@pytest.fixture
def server(tmp_path, request):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "quorum"))
    listener.listen(8)
    lost = []
    made = QuorumServer(
        listener,
        ReplicaPolicy(silent_s=getattr(request, "param", 60.0)),
        num_groups=2,
        num_ranks=1,
        token="secret",
        lost=lambda *args: lost.append(args),
    )
    made.told = lost
    yield made
    made.close()


@pytest.fixture
def connect(tmp_path):
    opened = []

    def made():
        opened.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        opened[-1].connect(str(tmp_path / "quorum"))
        opened[-1].settimeout(120)
        return opened[-1]

    yield made
    for each in opened:
        each.close()


def hello(group, **changed):
    return {"do": "hello", "token": "secret", "group": group, "attempt": 0, "rank": 0, "setup": "a"} | changed


def say(server, connection, *messages):
    """Send lines, let the server take them, and return what it answers."""
    for message in messages:
        connection.sendall((message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n")
    for _ in range(8):
        server.serve(0.01)
    connection.setblocking(False)
    try:
        data = connection.recv(1 << 16)
    except BlockingIOError:
        return None
    finally:
        connection.settimeout(120)
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize(
    "message",
    [
        hello(0, token="guess"),
        {"do": "ask", "step": 0, "stop": False, "admits": True},
        hello("zero"),
        [1, 2],
        7,
        b"\x80\x04\x95",
        b"{",
        b"[" * 5000,
        {"do": "hello"},
    ],
)
def test_who_is_none_of_the_run_is_not_let_in(server, connect, message):
    assert say(server, connect(), message) == []  # the end of the connection
    assert server.membership.members == ()


def test_a_rank_that_sends_nonsense_is_lost_and_the_others_go_on(server, connect):
    first, second = connect(), connect()
    assert say(server, first, hello(0)) == say(server, second, hello(1)) == [{"has_begun": False}]
    ask = {"do": "ask", "step": 0, "stop": False, "admits": True}
    say(server, first, ask)
    say(server, second, ask)
    say(server, second, {"do": "no such thing"})
    assert server.membership.left == (0,)
    assert {"broken": 1} in [json.loads(line) for line in first.recv(1 << 16).splitlines()]


@pytest.mark.parametrize("server", [2.0], indirect=True)
def test_a_group_that_falls_silent_is_lost(server, connect):
    first, second = connect(), connect()
    say(server, first, hello(0))
    say(server, second, hello(1))
    ask = {"do": "ask", "step": 0, "stop": False, "admits": True}
    say(server, first, ask)
    say(server, second, ask)
    while not server.told:  # the first one gives signs of life
        first.sendall(b'{"do": "beat"}\n')
        server.serve(0.01)
    assert server.told == [(1, "rank 0 of it was not heard of for 2 s")]
    assert server.membership.left == (0,)


@pytest.mark.parametrize("server", [1.0], indirect=True)
def test_the_last_group_with_the_state_may_be_silent_for_longer(server, connect):
    first, second = connect(), connect()
    say(server, first, hello(0))
    say(server, second, hello(1))
    for each in (first, second):
        say(server, each, {"do": "ask", "step": 0, "stop": False, "admits": True})
    second.close()
    began = time.monotonic()
    while not server.told:
        server.serve(0.1)
    assert server.told == [(0, "rank 0 of it was not heard of for 4 s")]
    assert time.monotonic() - began > 3  # that many more than a group beside others has


def test_a_line_without_an_end_is_not_kept(server, connect):
    connection = connect()
    connection.settimeout(0.1)
    with pytest.raises(ConnectionError):
        while True:
            connection.send(b"x" * 8192)
            server.serve(0.0)
    assert server.membership.members == ()
