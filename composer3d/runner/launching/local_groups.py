"""Groups of ranks on this machine: each started, watched and ended by a process of its own."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from composer3d.processes import fork
from composer3d.replicas import ADDRESS, ATTEMPT, GROUP, TOKEN
from composer3d.runner.launching.launcher import LaunchResult, run_world
from composer3d.runner.launching.lock import RunLock
from composer3d.runner.launching.signals import ParentSignals, kill
from composer3d.runner.launching.watch import Watch

__all__ = ["EndedGroup", "GroupWork", "LocalGroups"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """The work of the groups of one machine, and what it is done with.

    Args:
        function: What each rank runs; see `launch_local`.
        args: Its arguments.
        output: The run's folder.
        num_ranks: Ranks per group.
        device: Where the ranks compute.
        private: This launcher's private folder.
        lock: On the run's folder; None on a machine that does not hold it.
        grace_s: Seconds the ranks have after a SIGTERM.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    output: Path
    num_ranks: int
    device: Literal["cpu", "cuda"]
    private: Path
    lock: RunLock | None
    grace_s: float


class EndedGroup(NamedTuple):
    """A group whose processes have ended.

    Args:
        group: Number of the group.
        attempt: Number of its earlier starts.
        result: How it ended; None where its watching process was killed.
    """

    group: int
    attempt: int
    result: LaunchResult | None


class LocalGroups:
    """Starts, ends and waits for the groups of this machine.

    Args:
        work: What they run.
        groups: Numbers of this machine's groups, in the order of its devices.
        address: Of the membership server.
        token: Of the run.
        name: Of the run, in its private folder.
        close: Called in each forked process: closes sockets that are not its own.

    Attributes:
        groups: Their numbers.
        signals: Signals that this process has received.
    """

    def __init__(
        self,
        work: GroupWork,
        *,
        groups: Sequence[int],
        address: str,
        token: str,
        name: str,
        close: Callable[[], None],
    ) -> None:
        self._work, self.groups, self._close = work, tuple(groups), close
        self._address, self._token, self._name = address, token, name
        self._running: dict[int, tuple[int, int]] = {}  # by group: its attempt, and the pid of its watching process
        self._finished: dict[int, EndedGroup] = {}
        self.signals = ParentSignals()

    @property
    def running(self) -> dict[int, int]:
        """Attempts of the groups that run, or of whose end `ended` has not told; and of those that have finished."""
        return {each.group: each.attempt for each in self.finished} | {
            group: attempt for group, (attempt, _) in self._running.items()
        }

    @property
    def finished(self) -> list[EndedGroup]:
        """Groups that have come to the end of the run: a machine that takes over may not have heard of it."""
        return list(self._finished.values())

    def know(self, address: str) -> None:
        """Have groups that are started later find a server at an address, which may be in no list."""
        if address not in self._address.split(","):
            self._address = f"{address},{self._address}"

    def serve(self, *, lock: RunLock, close: Callable[[], None]) -> None:
        """Start later groups as the machine that serves does, which holds the lock, and has other sockets.

        Args:
            lock: On the run's folder.
            close: See `LocalGroups`.
        """
        self._work, self._close = replace(self._work, lock=lock), close

    @contextmanager
    def taking_signals(self) -> Iterator[None]:
        """Keep the signals for a loop, and see that no group outlives it."""
        self.signals.install()
        try:
            yield
        finally:
            self.end_all()
            self.signals.restore()

    def start(self, group: int, attempt: int) -> None:
        """Fork the process that starts a group's ranks, after one of an earlier start has ended."""
        if group in self._running:
            self.kill(group)
            os.waitpid(self._running.pop(group)[1], 0)
        self._finished.pop(group, None)
        pid = fork()
        if pid == 0:
            self._watch(group, attempt)
        self._running[group] = attempt, pid
        self.signals.pids = tuple(pid for _, pid in self._running.values())

    def kill(self, group: int) -> None:
        """End a group's processes: its ranks go with the one that watches them, those that were stopped too."""
        if group in self._running:
            kill(self._running[group][1], signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the processes that watch groups, which pass it on."""
        for _, pid in self._running.values():
            kill(pid, number)

    def ended(self) -> Iterator[EndedGroup]:
        """Yield groups whose processes have ended, once each."""
        for group, (attempt, pid) in list(self._running.items()):
            # The end of one before it may have ended this one too, and started the group again.
            if self._running.get(group) == (attempt, pid) and os.waitpid(pid, os.WNOHANG)[0]:
                self._running.pop(group)
                file = self._file(group, attempt)
                ended = EndedGroup(group, attempt, pickle.loads(file.read_bytes()) if file.exists() else None)
                if ended.result is not None and ended.result.report is None:
                    self._finished[group] = ended
                yield ended

    def wait(self, seconds: float) -> None:
        """Wait until all groups have ended, or a time has passed."""
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            for _ in self.ended():
                pass
            time.sleep(0.01)

    def end_all(self) -> None:
        """Kill all groups and wait for their processes."""
        self.send(signal.SIGKILL)
        for _, pid in self._running.values():
            os.waitpid(pid, 0)
        self._running.clear()

    def _watch(self, group: int, attempt: int) -> NoReturn:
        """Start a group's ranks and wait for them, in a process of its own; leave how it ended in a file."""
        work, code = self._work, 1
        try:
            self._close()
            os.setpgid(0, 0)  # Ctrl-C of a terminal reaches the parent, which passes it on once
            os.environ |= {
                ADDRESS: self._address,
                TOKEN: self._token,
                GROUP: str(group),
                ATTEMPT: str(attempt),
                **self._devices(group),
            }
            watch = Watch(
                private=work.private,
                num_ranks=work.num_ranks,
                max_restarts=0,
                timeout_s=None,
                grace_s=work.grace_s,
                run_id=f"{self._name}-{group}",
                attempt=attempt,
            )
            method: Literal["fork", "spawn"] = "fork" if work.device == "cpu" else "spawn"
            result = run_world(watch, method, (work.function, work.args, work.output), work.lock)
            file = self._file(group, attempt)
            beside = file.with_suffix(".tmp")
            beside.write_bytes(pickle.dumps(result))
            beside.rename(file)
            code = 0
        except BaseException:
            log.exception("group %d: the process that watches its ranks failed", group)
        finally:
            os._exit(code)

    def _devices(self, group: int) -> Mapping[str, str]:
        """Return the variable by which a group sees its own GPUs alone: its ranks number them from 0."""
        if self._work.device == "cpu":
            return {}
        import torch

        stated, num_ranks = os.environ.get("CUDA_VISIBLE_DEVICES"), self._work.num_ranks
        every = stated.split(",") if stated else [str(number) for number in range(torch.cuda.device_count())]
        place = self.groups.index(group)
        return {"CUDA_VISIBLE_DEVICES": ",".join(every[place * num_ranks : (place + 1) * num_ranks])}

    def _file(self, group: int, attempt: int) -> Path:
        return self._work.private / f"{self._name}-group-{group}-{attempt}.result"
