from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest
import torch

import composer3d
from composer3d.errors import ForkError
from composer3d.processes.forking import Gate, fork, limit_ranks, prewarm, refuse_unsafe_fork
from composer3d.testing import run_ranks

NUM_MANY = 1 << 20  # elements: above the size from which torch divides an operator among threads


def answer_of(body):
    """Ask a process of its own, which did `body`, whether it may fork; return what it is told."""
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        text = "body failed"
        try:
            body()
            refuse_unsafe_fork()
            text = "may fork"
        except ForkError as error:
            text = str(error)
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as answer:
        return answer.read()


def threaded_operator():
    torch.set_num_threads(2)
    torch.ones(NUM_MANY).add_(1)


def threaded_operator_and_back():
    threaded_operator()
    torch.set_num_threads(1)


def threaded_matmul():
    torch.set_num_threads(2)
    torch.ones(512, 512) @ torch.ones(512, 512)


def threaded_backward():
    torch.set_num_threads(2)
    torch.ones(NUM_MANY, requires_grad=True).sum().backward()


@pytest.mark.parametrize("body", [threaded_operator, threaded_operator_and_back, threaded_matmul, threaded_backward])
def test_a_fork_after_a_threaded_operator_is_refused(body):
    assert answer_of(body) == (
        "ranks cannot be forked from this process: it has run a tensor operator on several threads, and a forked rank "
        "would wait for ever for those threads at its first operator. Fork from a process that has only imported "
        "(move models, data and tensors into the ranks, or into a child of their own), set OMP_NUM_THREADS=1 before "
        'torch is imported, or start the ranks with the start method "spawn"'
    )


def nothing():
    pass


def operator_and_backward_on_one_thread():
    torch.set_num_threads(1)
    torch.ones(NUM_MANY, requires_grad=True).sum().backward()


def small_operator():
    torch.set_num_threads(2)
    torch.ones(8).add_(1)


def numpy_on_its_own_threads():
    numpy.ones((900, 900)) @ numpy.ones((900, 900))


@pytest.mark.parametrize(
    "body", [nothing, prewarm, operator_and_backward_on_one_thread, small_operator, numpy_on_its_own_threads]
)
def test_a_parent_without_a_pool_may_fork(body):
    assert answer_of(body) == "may fork"


def test_native_threads_that_do_no_harm_are_told_from_a_pool_by_trying():
    def body():
        # A thread that `threading` does not know, as those of a BLAS are.
        lock = _thread.allocate_lock()
        lock.acquire()
        _thread.start_new_thread(lock.acquire, ())
        assert len(os.listdir("/proc/self/task")) > threading.active_count()

    assert answer_of(body) == "may fork"


def test_a_pool_is_found_after_a_probe_that_passed():
    def body():
        _thread.start_new_thread(time.sleep, (60,))
        refuse_unsafe_fork()
        torch.set_num_threads(2)
        threaded_operator()

    assert "wait for ever for those threads" in answer_of(body)


def test_a_process_is_probed_once_for_the_threads_that_it_has():
    def body():
        _thread.start_new_thread(time.sleep, (60,))
        refuse_unsafe_fork()
        children = os.times().children_user + os.times().children_system
        for _ in range(50):
            refuse_unsafe_fork()
        assert os.times().children_user + os.times().children_system == children

    assert answer_of(body) == "may fork"


def test_ranks_run_where_a_fork_is_safe_even_if_they_use_threads():
    def body():
        torch.set_num_threads(2)
        run_ranks(threaded_operator, 2, init=False)

    assert answer_of(body) == "may fork"


PIPELINE = """composer3d = 1
[mesh]
pp = 2
[model]
use = "composer3d.models:llama"
args = { dim = 64, num_layers = 2, num_heads = 1, vocab_size = 256 }
[data]
use = "synthetic"
seq_len = 4096
[train]
steps = 1
global_batch = 2
[scheduling.pipeline]
"""


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_manifest_is_checked_and_planned_on_one_thread(command, tmp_path):
    """Dry runs compute masks and positions, large enough for two threads; second processes are forked after them."""
    (tmp_path / "run.toml").write_text(PIPELINE)

    def body():
        torch.set_num_threads(2)
        getattr(composer3d, command)(tmp_path / "run.toml")
        assert torch.get_num_threads() == 2

    assert answer_of(body) == "may fork"


FAKES = """
from composer3d import torch_compat
from composer3d.errors import ForkError
from composer3d.processes.forking import refuse_unsafe_fork
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
{before}
with FakeTensorMode():
    torch.ones(1)
torch.ones((), requires_grad=True).backward()
try:
    refuse_unsafe_fork()
    print("may fork")
except ForkError as error:
    print(error)
"""


@pytest.mark.parametrize("before", ["torch_compat.start_autograd()", "torch_compat.fake_tensors()"])
def test_fake_tensors_leave_a_process_that_may_fork(before):
    command = [sys.executable, "-c", FAKES.format(before=before)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    assert answer.stdout == "may fork\n"


@pytest.mark.skipif(torch.version.cuda is None, reason="this build of torch has no CUDA, whose devices start threads")
def test_a_fork_after_a_backward_that_started_threads_is_refused():
    command = [sys.executable, "-c", FAKES.format(before="")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    assert answer.stdout == (
        "ranks cannot be forked from this process: it has run a backward where torch sees GPUs, so autograd has "
        "threads for them, and would refuse every backward of a forked rank. Fork from a process that has only "
        "imported (move models, data and tensors into the ranks, or into a child of their own), set "
        "CUDA_VISIBLE_DEVICES to nothing before torch is imported, or start the ranks with the start method "
        '"spawn"\n'
    )


def test_a_process_that_only_imported_may_fork_and_its_ranks_import_no_more():
    code = (
        "import os, sys; from composer3d.processes.forking import prewarm, refuse_unsafe_fork;"
        "prewarm(); refuse_unsafe_fork();"
        "threads = len(os.listdir('/proc/self/task')); import torch; before = set(sys.modules);"
        "layer = torch.nn.Linear(4, 4); optimizer = torch.optim.AdamW(layer.parameters());"
        "layer(torch.ones(2, 4)).sum().backward(); optimizer.step();"
        "print(threads, [name for name in set(sys.modules) - before if name.startswith('torch._dynamo')])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200, check=True)
    assert answer.stdout == "1 []\n"


def test_prewarm_names_a_module_that_does_not_exist():
    with pytest.raises(ImportError, match="no_such_module"):
        prewarm(["no_such_module"])


def test_this_process_may_fork():
    assert refuse_unsafe_fork() is None, "it raises where a process may not"


def test_a_child_dies_with_its_parent():
    read, write = os.pipe()
    middle = fork()
    if middle == 0:
        os.close(read)
        if fork() == 0:
            signal.pause()
        os._exit(0)
    os.close(write)
    os.waitpid(middle, 0)
    # The grandchild holds the other end: the pipe ends when it does.
    started = time.monotonic()
    assert os.read(read, 1) == b""
    assert time.monotonic() - started < 250  # else the grandchild waits for ever
    os.close(read)


def test_ranks_wait_for_room(tmp_path):
    waits = threading.Event()
    order = []

    def second():
        waits.set()
        with limit_ranks(2, limit=3, folder=tmp_path):
            order.append("second")

    with limit_ranks(2, limit=3, folder=tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(120)
        thread.join(0.1)
        order.append("first")
    thread.join(120)
    assert order == ["first", "second"]


def test_ranks_that_fit_do_not_wait(tmp_path):
    with limit_ranks(1, limit=3, folder=tmp_path), limit_ranks(2, limit=3, folder=tmp_path):
        assert sorted(file.name for file in tmp_path.iterdir()) == ["place-0", "place-1", "place-2", "queue"]


def test_room_is_given_back_by_a_process_that_is_killed(tmp_path):
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        with limit_ranks(3, limit=3, folder=tmp_path):
            os.write(write, b"x")
            signal.pause()
        os._exit(0)
    assert os.read(read, 1) == b"x"
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    with limit_ranks(3, limit=3, folder=tmp_path):
        assert (tmp_path / "place-2").exists()
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("num_ranks", [0, 9])
def test_more_ranks_than_there_is_room_for_are_refused(num_ranks):
    with pytest.raises(ForkError) as caught, limit_ranks(num_ranks):
        pass
    assert str(caught.value) == (
        f"{num_ranks} ranks at once were asked for, and 1 to 8 are allowed; "
        "composer3d.testing.fake_world stands in for larger worlds in one process"
    )


def fork_behind(gate, writer):
    pid = fork()
    if not pid:
        try:
            gate.wait()
        except SystemExit:
            os._exit(41)
        os.write(writer, b"through ")
        os._exit(0)
    return pid


def test_forked_ranks_wait_until_the_gate_is_opened():
    gate, (reader, writer) = Gate(), os.pipe()
    pids = [fork_behind(gate, writer) for _ in range(3)]
    os.write(writer, b"opened ")
    gate.open(len(pids))
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    gate.close()
    assert os.read(reader, 99) == b"opened through through through "


def test_forked_ranks_leave_when_their_parent_closes_the_gate():
    gate, (reader, writer) = Gate(), os.pipe()
    pid = fork_behind(gate, writer)
    gate.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 41
    os.close(writer)
    assert os.read(reader, 99) == b""
