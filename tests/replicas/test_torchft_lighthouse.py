"""Why torchft's lighthouse is not asked who takes part in a step: what it answers where it is installed.

Should one of these fail with a later torchft, plugins/README.md states a reason that holds no more.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)


@pytest.fixture
def client():
    """A function that connects to a lighthouse of one's own."""
    found = pytest.importorskip("torchft._torchft", reason="needs torchft, which composer3d does not")
    options = {"join_timeout_ms": 60_000, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 60_000}
    server = found.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, **options)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    yield lambda: found.LighthouseClient(address, LONG)
    server.shutdown()


def asked(clients, **options):
    """Ask for groups by name, all at once; return each one's quorum."""
    found = {}

    def ask(name, client):
        found[name] = client.quorum(replica_id=name, timeout=LONG, **options)

    threads = [threading.Thread(target=ask, args=each) for each in clients.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_group_that_was_started_again_has_the_epoch_of_its_earlier_start(client):
    first, second = client(), client()
    before = asked({"0": first, "1": second}, step=3)
    after = asked({"0": first, "1": client()}, step=4)  # the second one's process is another
    assert before["0"].quorum_id == after["0"].quorum_id  # and nobody is told that its exchange is gone


def test_a_group_whose_process_has_ended_is_a_member_of_the_next_step(client):
    first, second = client(), client()
    asked({"0": first, "1": second}, step=3)
    with pytest.raises(TimeoutError):  # as the last thing that its process does
        second.quorum(replica_id="1", timeout=SHORT, step=4)
    members = first.quorum(replica_id="0", timeout=LONG, step=4).participants
    assert [member.replica_id for member in members] == ["0", "1"]


def test_nobody_is_asked_for_a_secret_and_nothing_is_voted_on(client):
    clients = {"whoever": client(), "else": client()}
    assert [each for each in dir(clients["else"]) if not each.startswith("_")] == ["heartbeat", "quorum"]
    members = asked(clients, step=9)["else"].participants
    assert sorted(member.replica_id for member in members) == ["else", "whoever"]
