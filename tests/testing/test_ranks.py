from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

import composer3d
from composer3d.errors import ForkError, RankError
from composer3d.processes import fake_world
from composer3d.testing import run_ranks


def alone(pid):
    """Tell whether a pid belongs to no process any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_compute_together_and_return_by_rank(world_size):
    def work(start):
        total = torch.tensor([start + dist.get_rank()])
        dist.all_reduce(total)
        return dist.get_rank(), total, torch.get_num_threads()

    expected = sum(10 + rank for rank in range(world_size))
    assert run_ranks(work, world_size, 10) == [(rank, torch.tensor([expected]), 1) for rank in range(world_size)]


def test_a_process_in_a_group_starts_no_ranks():
    """As a cell's composition that is open: its ranks would be in its group."""
    with fake_world(2, 0):
        for start in (lambda: run_ranks(os.getpid, 2), lambda: composer3d.run("quickstart")):
            with pytest.raises(ForkError, match="as of a composition that is open, .* write run.close\\(\\) first"):
                start()


def test_the_environment_is_that_of_torchrun_and_stays_in_the_ranks():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    seen = run_ranks(lambda: ([os.environ[name] for name in names], dist.is_initialized()), 2, init=False)
    assert seen == [(["0", "0", "2", "2"], False), (["1", "1", "2", "2"], False)]
    assert not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & os.environ.keys()


def test_the_process_group_has_the_backend_and_the_timeout():
    def work():
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        return dist.get_backend(), backend.options._timeout.total_seconds()

    assert run_ranks(work, 2, backend="gloo", timeout_s=20) == [("gloo", 20.0)] * 2


def test_a_rank_that_is_done_early_keeps_its_connections_open_for_the_others(tmp_path):
    sent = []

    def work():
        # More than sockets hold, so that it only arrives while the sender lives.
        message = torch.ones(1 << 23)
        if dist.get_rank() == 0:
            sent.append(dist.isend(message, dst=1))
            (tmp_path / "done").touch()
            return None
        while not (tmp_path / "done").exists():
            os.sched_yield()
        dist.recv(message.zero_(), src=0)
        return message.sum().item()

    assert run_ranks(work, 2) == [None, float(1 << 23)]


def test_a_rank_that_waits_for_one_that_is_done_fails_soon():
    def work():
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))

    started = time.monotonic()
    with pytest.raises(RankError, match="^rank 1 of 2 failed: RuntimeError: .*[Cc]onnection closed"):
        run_ranks(work, 2)
    assert time.monotonic() - started < 250


def test_the_first_failure_is_reported_and_its_victims_are_told_apart():
    def work():
        if dist.get_rank() == 1:
            raise ValueError("no such layer")
        dist.all_reduce(torch.ones(1))

    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(work, 2)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 failed: ValueError: no such layer\nTraceback (most recent call last):\n")
    assert 'raise ValueError("no such layer")' in text
    assert "\nrank 0 failed after it: " in text
    assert time.monotonic() - started < 250


def test_the_cause_outranks_a_victim_that_died_before_it():
    read, write = os.pipe()

    def work():
        if dist.get_rank() == 0:
            os.write(write, b"x")
            raise RuntimeError("Connection closed by peer [127.0.0.1]")
        os.read(read, 1)
        raise KeyError("cause")

    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: KeyError: 'cause'\n"):
        run_ranks(work, 2)


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_a_killed_rank_is_named(killer):
    def work():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), killer)
        dist.barrier()

    with pytest.raises(RankError) as caught:
        run_ranks(work, 2)
    text = str(caught.value)
    assert text.startswith(f"rank 1 of 2 failed: killed by {killer.name}\n")
    # What kills in C++ leaves the Python stack; SIGKILL leaves nothing.
    assert ("test_ranks.py" in text.split("rank 0 failed")[0]) == (killer != signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 5])
def test_a_rank_that_leaves_early_is_named(code):
    def work():
        if dist.get_rank() == 0:
            os._exit(code)
        dist.barrier()

    with pytest.raises(RankError, match=f"^rank 0 of 2 failed: left with exit code {code} before it returned a result"):
        run_ranks(work, 2)


def test_a_rank_that_calls_exit_is_named():
    def work():
        if dist.get_rank() == 1:
            sys.exit(0)

    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: SystemExit: 0\n"):
        run_ranks(work, 2)


def test_ranks_that_hang_are_killed_and_show_where_they_were(tmp_path):
    def work():
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        dist.barrier()
        if dist.get_rank() == 1:
            signal.pause()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError) as caught:
        run_ranks(work, 2, timeout_s=10)
    text = str(caught.value)
    assert "rank 0 of 2 did not finish within 10 s and was killed; it was at\n" in text
    assert "all_reduce" in text
    assert "rank 1 of 2 did not finish within 10 s and was killed; it was at\n" in text
    assert "test_ranks.py" in text.split("rank 1 of 2")[1]
    assert all(alone(int((tmp_path / str(rank)).read_text())) for rank in range(2))


def test_a_rank_that_does_not_notice_a_failure_is_killed():
    def work():
        if dist.get_rank() == 0:
            raise ValueError("gone")
        signal.pause()

    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(work, 2)
    assert str(caught.value).startswith("rank 0 of 2 failed: ValueError: gone\n")
    assert "rank 1 of 2 did not finish within 2 s after that and was killed; it was at\n" in str(caught.value)
    assert time.monotonic() - started < 250


def test_a_result_that_cannot_travel_is_said_so():
    with pytest.raises(RankError, match="this is what the rank returned: return tensors and plain values, or None"):
        run_ranks(lambda: lambda: 1, 1)


def test_a_warning_in_a_rank_is_what_it_is_in_the_parent():
    def work():
        import warnings

        warnings.warn("careless", UserWarning, stacklevel=1)

    with pytest.raises(RankError, match="UserWarning: careless"):
        run_ranks(work, 1)


def test_output_of_ranks_is_neither_lost_nor_doubled(capfd):
    sys.stdout.write("parent ")
    run_ranks(lambda: sys.stdout.write("rank "), 2)
    sys.stdout.flush()
    assert sorted(capfd.readouterr().out.split()) == ["parent", "rank", "rank"]


def test_other_children_are_left_alone():
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    run_ranks(lambda: None, 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_world_above_the_limit_is_refused():
    with pytest.raises(ForkError, match="16 ranks at once were asked for, and 1 to 8 are allowed"):
        run_ranks(lambda: None, 16)
