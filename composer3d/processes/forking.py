"""Forking of ranks: modules imported beforehand, a parent that is safe to fork, and a limit of ranks on the machine.

On CPU ranks are forked: a spawned rank pays seconds for its imports, a forked one none. The price is that the parent
may only have imported. OpenMP keeps a pool of threads per process; a fork copies the pool's bookkeeping but not its
threads, and the child waits for them for ever at its first operator that uses more than one.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from composer3d.errors import ForkError
from composer3d.processes.private_folder import open_private, user_folder
from composer3d.processes.versions import installed_version
from composer3d.torch_compat import lazy_modules, start_autograd, writing_operators

__all__ = [
    "Gate",
    "die_with",
    "flush_output",
    "fork",
    "limit_ranks",
    "prewarm",
    "refuse_open_group",
    "refuse_side_thread",
    "refuse_unsafe_fork",
]

_PROBE_LIMIT_S = 10.0
_NO_BACKWARD = 3  # exit status of a probe
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def prewarm(modules: Iterable[str] | None = None) -> None:
    """Import what a first distributed step imports, and read what compositions ask of torch, so that ranks do not.

    About 2 s once; without it every rank pays 1 s, and more when they compete for few cores. Starts no thread, and runs
    no tensor operator but one of one element where torch was built for devices that this machine has not: see
    `torch_compat.start_autograd`.

    Args:
        modules: Dotted names; by default those that FSDP2, DTensor, pipelines and checkpoints import lazily.

    Raises:
        ImportError: A module does not exist.
    """
    for module in lazy_modules() if modules is None else modules:
        importlib.import_module(module)
    if modules is None:
        writing_operators()
        for name in ("composer3d", "torch"):
            installed_version(name)
    start_autograd()


def refuse_unsafe_fork() -> None:
    """Refuse to fork if this process ran a tensor operator on several threads, since forked ranks would hang.

    A process without native threads is safe, and the usual case ends there. Native threads may be harmless (numpy's
    BLAS starts some at import, and knows about forks), so if there are any, a probe is forked that runs one operator
    on two threads and a backward: it ends within 0.1 s, or it is seen to hang and is killed. A process that passed is
    probed again after another native thread has started.

    Raises:
        ForkError: A forked child would hang at its first operator on several threads, or could run no backward.
    """
    threads: frozenset[int] | None = _native_threads() if "torch" in sys.modules else frozenset()
    if threads is None:
        _refuse_by_probe()
    elif threads:
        _refuse_with(threads)


def refuse_open_group() -> None:
    """Refuse to fork ranks from a process that is in a process group, which they would inherit.

    Raises:
        ForkError: A composition of this process is open, or it has made a group itself.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise ForkError(
            "ranks cannot be forked from this process: it is in a process group, as of a composition that is open, and "
            "they would be in it too; write run.close() first, or torch.distributed.destroy_process_group()"
        )


def refuse_side_thread() -> None:
    """Refuse to start ranks from another thread than the main one, which alone may handle signals.

    Raises:
        ForkError: This is another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ForkError(
            f'ranks cannot be started from the thread "{threading.current_thread().name}": the signals that end them '
            "reach the main thread alone; start them there, or in a process of their own"
        )


@lru_cache(maxsize=1)
def _refuse_with(threads: frozenset[int]) -> None:
    """Probe once for a set of native threads; a pool that starts later has others, and errors are not kept."""
    _refuse_by_probe()


def _refuse_by_probe() -> None:
    status = _probe()
    if status == _NO_BACKWARD:
        raise ForkError(
            "ranks cannot be forked from this process: it has run a backward where torch sees GPUs, so autograd has "
            "threads for them, and would refuse every backward of a forked rank. Fork from a process that has only "
            "imported (move models, data and tensors into the ranks, or into a child of their own), set "
            "CUDA_VISIBLE_DEVICES to nothing before torch is imported, or start the ranks with the start method "
            '"spawn"'
        )
    if status == 0:
        return
    raise ForkError(
        "ranks cannot be forked from this process: it has run a tensor operator on several threads, and a forked rank "
        "would wait for ever for those threads at its first operator. Fork from a process that has only imported "
        "(move models, data and tensors into the ranks, or into a child of their own), set OMP_NUM_THREADS=1 before "
        'torch is imported, or start the ranks with the start method "spawn"'
    )


def flush_output() -> None:
    """Write what is buffered, unless code of others has closed it, or this process was started without."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()


def fork() -> int:
    """Fork this process; return 0 in the child, which is killed when its parent dies, and the child's pid otherwise.

    The caller asks `refuse_unsafe_fork` first and leaves the child by `os._exit`.
    """
    # What is still buffered would be written once by each process.
    flush_output()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of any fork with threads; refuse_unsafe_fork knows which of them matter.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        # A collection would look at every object of the parent, and so copy the pages that both share.
        gc.freeze()
        die_with(parent)
    return pid


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, whatever this process catches; elsewhere than Linux not.

    Args:
        parent: The parent's pid; where it is the parent no more, this process ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call, and no signal will come
        os._exit(1)


class Gate:
    """Holds forked ranks back until the last of them is forked.

    The server of torch's store resolves the names of those that connect to it, in a thread of the parent. glibc guards
    its resolver by a lock that a fork copies as it is: a rank that is forked while a sister connects may wait for ever
    at its own first name, inside `getaddrinfo` (2 of 107 forks, glibc 2.36). Behind a gate no rank connects meanwhile.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def wait(self) -> None:
        """Wait, in a forked rank, for the gate to be opened.

        Raises:
            SystemExit: The parent has gone, or closed the gate.
        """
        os.close(self._writer)  # or the end of the parent would go unseen
        opened = os.read(self._reader, 1)
        os.close(self._reader)
        if not opened:
            raise SystemExit(1)

    def open(self, num_ranks: int) -> None:
        """Let that many ranks go on.

        Args:
            num_ranks: How many have been forked.
        """
        os.write(self._writer, bytes(num_ranks))

    def close(self) -> None:
        """Close the parent's ends; ranks that still wait leave."""
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def limit_ranks(num_ranks: int, *, limit: int = 8, folder: Path | None = None) -> Iterator[None]:
    """Hold room for `num_ranks` ranks; wait while others on this machine hold too much of it.

    A counting semaphore over processes: one file a place, held by `flock`, so that the kernel gives a place back
    whatever happens to its holder and the ranks forked from it. Whoever waits does so alone, behind one more lock:
    two processes that each hold half of what they need cannot arise.

    Args:
        num_ranks: Places to take.
        limit: Places there are; the same for all that share a folder.
        folder: Where the lock files lie, open to this user alone; by default one in the temporary folder.

    Raises:
        ForkError: `num_ranks` is above the limit, so it would wait for ever; or the folder is open to other users.
    """
    if not 1 <= num_ranks <= limit:
        raise ForkError(
            f"{num_ranks} ranks at once were asked for, and 1 to {limit} are allowed; "
            "composer3d.testing.fake_world stands in for larger worlds in one process"
        )
    if folder is None:
        folder = user_folder("composer3d-ranks")
    else:
        folder.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as places:
        with os.fdopen(open_private(folder, "queue"), "r+") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            _take(folder, num_ranks, limit, places)
        yield


def _take(folder: Path, num_ranks: int, limit: int, places: ExitStack) -> None:
    left = set(range(limit))
    while True:
        for place in sorted(left):
            file = os.fdopen(open_private(folder, f"place-{place}"), "r+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            places.callback(file.close)
            # Unlocked, and not merely closed: a child that outlives its rank may still hold the file open.
            places.callback(fcntl.flock, file, fcntl.LOCK_UN)
            left.discard(place)
            if limit - len(left) == num_ranks:
                return
        time.sleep(0.01)


def _native_threads() -> frozenset[int] | None:
    """Return the threads that `threading` does not know; None where /proc does not show them."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    return frozenset({int(task.name) for task in tasks.iterdir()} - {t.native_id for t in threading.enumerate()})


def _probe() -> int:
    """Return 0 if a forked child gets through an operator on two threads and a backward, and else its exit status."""
    pid = fork()
    if pid == 0:
        _run_threaded()
    deadline, asleep = time.monotonic() + _PROBE_LIMIT_S, 0
    while time.monotonic() < deadline and asleep < 10:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        # The probe only computes. With all its threads asleep, it waits for one that is not there.
        asleep = asleep + 1 if _sleeps(pid) else 0
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 1


def _run_threaded() -> None:
    """Run the probe's operator and its backward, and leave; never returns."""
    status = 1
    try:
        import torch

        torch.set_num_threads(2)
        torch.ones(1 << 17).add_(1)  # four times the size below which torch keeps to one thread
        status = _NO_BACKWARD
        torch.ones((), requires_grad=True).backward()
        status = 0
    finally:
        os._exit(status)


def _sleeps(pid: int) -> bool:
    """Return whether every thread of a process sleeps."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended while it was being looked at
        return False
    return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)
