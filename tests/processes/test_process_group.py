"""Which device is a process's own, and worlds that follow each other in one process."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import composed
from torch import nn

from composer3d import torch_compat
from composer3d.processes.process_group import default_device, own_device
from composer3d.testing import fake_world, run_ranks


@pytest.mark.parametrize(
    ("stated", "local", "own"),
    [
        ("cpu", "3", "cpu"),
        ("cuda", "3", "cuda:3"),
        ("cuda:1", "3", "cuda:1"),
        (torch.device("cuda"), "0", "cuda:0"),
        ("meta", "2", "meta"),
    ],
)
def test_a_device_without_a_number_is_this_ranks(monkeypatch, stated, local, own):
    monkeypatch.setenv("LOCAL_RANK", local)
    assert own_device(stated) == torch.device(own)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, and it has a number")
def test_without_a_launcher_and_an_accelerator_a_device_stays_as_stated(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_device("cuda") == torch.device("cuda")
    assert default_device() == torch.device("cpu")


ROUNDS = 50


def end_one_way_or_another(run, number):
    """Run a step that goes well or fails, by turns, and close the composition."""
    x = torch.ones(2, 4)
    try:
        with run.step(0):
            run.forward_backward(x, target=x)
            if number % 3 == 1:
                raise ValueError("made up")
            run.clip_grad_norm_(1.0)
        run.close()
    except Exception as error:
        run.close(error)
        return type(error).__name__
    return "good"


def compose_again_and_again(port, is_agents):
    """Compose and close `ROUNDS` times; the last rank only holds the store, as torchrun's agent does."""
    rank = int(os.environ["RANK"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    if is_agents:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if rank == 2:
        held = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        held.wait(["done/0", "done/1"], timedelta(seconds=100))
        return [], [], ""
    ends, held = [], []
    for number in range(ROUNDS):
        run = composed("[sharding.fsdp2]\n", model=lambda: nn.Linear(4, 4), loss_fn=F.mse_loss, device="cpu")
        ends.append(end_one_way_or_another(run, number))
        held.append(len(os.listdir("/proc/self/fd")))
    if is_agents:
        dist.TCPStore("127.0.0.1", port).set(f"done/{rank}", "1")
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        sys.excepthook(ValueError, ValueError("made up"), None)
    return ends, held, told.getvalue()


@pytest.mark.parametrize("is_agents", [False, True], ids=["first rank's store", "agent's store"])
def test_a_process_composes_again_and_again(is_agents):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, second, *_ = run_ranks(compose_again_and_again, 2 + is_agents, port, is_agents, init=False)
    for rank, (ends, held, told) in enumerate((first, second)):
        assert told == f"[rank{rank}]: ValueError: made up\n"  # once, after all these worlds
        assert ends == ["ValueError" if number % 3 == 1 else "good" for number in range(ROUNDS)]
        assert max(held[10:]) <= max(held[:10]), "sockets of earlier worlds are held"


def compose_in_a_loops_world():
    """Compose and close in the loop's own world; return groups and descriptors after each round, and a sum of both."""
    ends, held, groups = [], [], []
    for number in range(ROUNDS):
        run = composed("[sharding.fsdp2]\n", model=lambda: nn.Linear(4, 4), loss_fn=F.mse_loss, device="cpu")
        if number == 0:
            own = dist.new_group([0, 1])
        ends.append(end_one_way_or_another(run, number))
        groups.append(len(torch_compat.all_groups()))
        held.append(len(os.listdir("/proc/self/fd")))
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(total, group=own)
    return ends, held, groups, total.item()


@pytest.mark.slow
def test_groups_that_compositions_made_in_a_loops_world_end_with_them():
    for ends, held, groups, total in run_ranks(compose_in_a_loops_world, 2):
        assert ends == ["ValueError" if number % 3 == 1 else "good" for number in range(ROUNDS)]
        assert groups == [2] * ROUNDS  # the world, and the loop's own
        assert max(held[10:]) <= max(held[:10]), "sockets of earlier groups are held"
        assert total == 4


def test_a_world_of_ranks_that_do_not_exist_leaves_pythons_excepthook():
    before = sys.excepthook
    with fake_world(4, rank=2):
        assert sys.excepthook is not before
    assert sys.excepthook is before


def together(layouts):
    """Return losses of two compositions that step by turns, before and after the first is closed."""
    runs = [composed(layout, model=lambda: nn.Linear(4, 4), loss_fn=F.mse_loss, device="cpu") for layout in layouts]
    x, losses = torch.ones(2, 4), []
    for number in range(2):
        for run in runs[number:]:
            with run.step(number):
                losses.append(float(run.forward_backward(x, target=x)))
                run.clip_grad_norm_(1.0)
        runs[number].close()
    return losses, dist.is_initialized()


def in_a_world_of_their_own(port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return together(["[sharding.fsdp2]\n", "[sharding.ddp]\n"])


def test_a_world_lives_as_long_as_the_last_of_its_compositions():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for losses, is_initialized in run_ranks(in_a_world_of_their_own, 2, port, init=False):
        assert len(set(losses)) == 1 and not is_initialized
