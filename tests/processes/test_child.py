"""Work in a forked child: its result, its failures, its end."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from composer3d.errors import ArgumentError, ComposerError, DataError
from composer3d.processes.child import Child, ChildError
from composer3d.processes.foreign_code import running
from composer3d.processes.forking import fork


def test_a_child_computes_and_this_process_does_not():
    parent = os.getpid()
    state = {}

    def compute():
        state["changed"] = True
        return {"parent": os.getppid(), "text": "x" * 100_000}

    result = Child(compute).result()
    assert result == {"parent": parent, "text": "x" * 100_000}
    assert state == {}


def test_a_child_is_ready_once_it_has_answered():
    read, write = os.pipe()

    def wait():
        os.read(read, 1)
        return {}

    child = Child(wait)
    assert not child.ready()
    os.write(write, b"x")
    assert child.result() == {}
    os.close(read)
    os.close(write)


def test_time_in_which_other_processes_have_the_cores_is_not_counted():
    def compute():
        with running("called", "mine:loss", limit_s=0.5):
            began = time.thread_time()
            while time.thread_time() < began + 0.25:
                pass
        return {}

    others = []
    for _ in range(3 * (os.cpu_count() or 1)):
        if (pid := fork()) == 0:
            while True:  # until it is killed, or this process ends
                pass
        others.append(pid)
    try:
        assert Child(compute).result() == {}
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_mistakes_of_the_user_come_back():
    def fail():
        raise DataError("no data")

    with pytest.raises(ComposerError, match=r"^no data$"):
        Child(fail).result()


def test_an_argument_comes_back_as_it_was_raised():
    def fail():
        raise ArgumentError("rank", "{world_size} is less", value=5)

    with pytest.raises(ArgumentError) as caught:
        Child(fail).result()
    assert str(caught.value) == "rank=5: world_size is less"
    assert (
        caught.value.for_command({"rank": "--rank", "world_size": "--world-size"}) == "--rank 5: --world-size is less"
    )


def test_other_failures_come_back_with_their_traceback():
    with pytest.raises(ChildError) as caught:
        Child(lambda: {"x": 1 // 0}).result()
    error = "ZeroDivisionError: integer division or modulo by zero"
    first, *others, last = str(caught.value).splitlines()
    assert first == f"the process that checks the manifest failed: {error}"
    assert others[0].startswith("Traceback") and last == error


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(7), "ended with exit code 7"),
    ],
)
def test_a_child_that_ends_without_a_word(end, told):
    with pytest.raises(ChildError) as caught:
        Child(end).result()
    assert str(caught.value) == f"the process that checks the manifest {told} and left no result"


def test_what_the_child_prints_is_seen(capfd):
    Child(lambda: {"written": sys.stdout.write("from the factory\n")}).result()
    assert capfd.readouterr().out == "from the factory\n"


def test_a_child_that_nobody_waits_for_is_killed():
    read, write = os.pipe()
    child = Child(lambda: {"never": os.read(read, 1).decode()})
    pid = child.pid
    child.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    os.close(read)
    os.close(write)
