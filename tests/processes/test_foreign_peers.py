"""Processes that are no ranks and connect to the ports of ranks: refused, or without effect."""

from __future__ import annotations

import functools
import os
import re
import socket
from pathlib import Path

import pytest
import torch
from support.other_users import NOBODY, OTHERS
from support.strangers import NONSENSE, NUMBERS, stranger

import composer3d
from composer3d.errors import RendezvousError
from composer3d.processes.foreign_peers import refuse_foreign_peers
from composer3d.processes.forking import limit_ranks
from composer3d.runner.launching.launcher import launch_local

MANIFEST = "composer3d = 1\n[sharding.fsdp2]\n"


def reduced(folder):
    """Name this process in a folder, compose, and return what a step of two ranks makes of its gradient."""
    Path(folder, str(os.getpid())).touch()
    manifest = Path(folder).with_name("run.toml")
    torch.manual_seed(0)
    run = composer3d.compose(
        lambda: torch.nn.Linear(2, 1, bias=False),
        manifest,
        loss_fn=lambda out, target: (out.sum(), len(out)),
        device="cpu",
        timeout_s=60,
    )
    with run.step(0):
        run.forward_backward(torch.full((1, 2), 1.0 + 2 * run.context.rank), target=torch.ones(1))
        gradient = run.full_tensor("weight", run.model.weight.grad).tolist()
    run.close()
    return gradient


def launched(tmp_path, messages, *, user=None):
    folder = tmp_path / "ranks"
    folder.mkdir()
    (tmp_path / "run.toml").write_text(MANIFEST)
    with limit_ranks(2), stranger(folder, messages, user=user) as number:
        result = launch_local(functools.partial(reduced, str(folder)), num_ranks=2, device="cpu", output=tmp_path)
    assert number.value > 1
    return result


def test_connections_that_say_nothing_or_nonsense_change_no_gradient(tmp_path):
    result = launched(tmp_path, NONSENSE)
    assert result.ok, result.report.render()
    assert [value for value in result.values.values()] == [[[2.0, 2.0]]] * 2


@OTHERS
def test_another_user_in_a_ranks_place_is_named(tmp_path):
    result = launched(tmp_path, NUMBERS, user=NOBODY)
    assert not result.ok
    assert re.search(rf"a process of user {NOBODY} \(port \d+\) is connected to port \d+", result.report.render())


@OTHERS
def test_ports_that_were_open_before_are_for_others_too():
    with socket.create_server(("127.0.0.1", 0)) as before, refuse_foreign_peers():
        with socket.create_server(("127.0.0.1", 0)) as own, socket.create_connection(own.getsockname()):
            os.seteuid(NOBODY)
            try:
                client = socket.create_connection(before.getsockname())
            finally:
                os.seteuid(0)
            with client, refuse_foreign_peers():
                pass


@OTHERS
def test_the_port_and_the_user_are_named():
    with pytest.raises(RendezvousError) as caught, refuse_foreign_peers():
        server = socket.create_server(("127.0.0.1", 0))
        os.seteuid(NOBODY)
        try:
            client = socket.create_connection(server.getsockname())
        finally:
            os.seteuid(0)
    ports = client.getsockname()[1], server.getsockname()[1]
    client.close()
    server.close()
    assert str(caught.value) == (
        f"a process of user {NOBODY} (port {ports[0]}) is connected to port {ports[1]}, on which this process waits "
        "for ranks; values from it could stand in a rank's place. End that process, or run where no other user has "
        "access"
    )
