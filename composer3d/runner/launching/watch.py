"""Supervision of a local world by its parent: the ranks that ended, the first of them, and the end of the others."""

from __future__ import annotations

import logging
import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

from composer3d.runner.launching.node_counts import next_smaller
from composer3d.runner.launching.signals import ParentSignals, kill
from composer3d.runner.reporting.failures import Ending, FailureKind, FailureReport, root_cause
from composer3d.runner.reporting.progress import NOTICE, LastSeen, RunPhase, left_reason

__all__ = ["POLL_S", "Ended", "Outcome", "Restart", "Watch"]

Outcome = Literal["finished", "preempted", "interrupted", "failed"]
POLL_S = 0.05
_PEERS_S = 1.0  # how long ranks that lost another may take to notice it
_REPORT_S = 15.0  # and from then to report it: they ask all others first, on a machine that may be busy
_TERM_S = 2.0  # and then to end after SIGTERM
_INTERRUPT_S = 5.0

log = logging.getLogger(__name__)


class Ended(Exception):
    """Leaves the agent's loop: the ranks have ended and are not restarted."""

    def __init__(self, outcome: Outcome, report: FailureReport | None = None) -> None:
        self.outcome = outcome
        self.report = report
        super().__init__(outcome)


class Restart(Exception):
    """Leaves the agent's loop: the ranks have ended, and are to be restarted."""


class Watch:
    """The parent's eye on its ranks, called by the agent before each of its own looks.

    The agent reports one failed process, and waits 30 s for the others; here all endings are seen, without being
    reaped, so that the agent finds them as it expects. A rank is done when its marker shows that its function has
    returned, however its process ends after that.
    """

    def __init__(
        self,
        *,
        private: Path,
        num_ranks: int,
        max_restarts: int,
        timeout_s: float | None,
        grace_s: float,
        run_id: str | None = None,
        attempt: int = 0,
        sizes: Sequence[int] = (),
    ) -> None:
        self.run_id = run_id or uuid.uuid4().hex
        self.private = private
        self.num_ranks = num_ranks
        self._sizes = tuple(sizes)
        self.max_restarts = max_restarts + attempt
        self.num_restarts = attempt
        self.grace_s = grace_s
        self.signals = ParentSignals()
        self._deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._kill_at = float("inf")
        self._pids: dict[int, int] = {}
        self._endings: dict[int, Ending] = {}
        self._reaped: set[int] = set()

    @property
    def folder(self) -> Path:
        """The rank files of the attempt that is running."""
        return self.private / f"{self.run_id}-{self.num_restarts}"

    @contextmanager
    def taking_signals(self) -> Iterator[None]:
        """Keep the signals for the loop, and see that no rank outlives it."""
        self.signals.install()
        try:
            yield
        finally:
            self._collect()
            self._send(signal.SIGKILL)
            self.signals.restore()

    def started(self, pids: Mapping[int, int]) -> None:
        """Note the processes of a new attempt.

        Args:
            pids: The process of each rank.
        """
        self._pids = dict(pids)
        self._endings = {}
        self._reaped = set()
        self.signals.pids = tuple(pids.values())
        self.signals.install()

    def look(self) -> None:
        """Look at the ranks, and act on signals and limits; raise once they have ended."""
        self._collect()
        if self.signals.interrupt:
            self._interrupt()
        if all(self._done(rank) for rank in self._pids):
            self._finish()
        if self.signals.terminate and self._kill_at == float("inf"):
            self._kill_at = time.monotonic() + self.grace_s
            self._send(signal.SIGTERM)
        if time.monotonic() > self._kill_at:
            self._give_up(f"did not stop within {self.grace_s:g} s after SIGTERM")
        if time.monotonic() > self._deadline:
            self._give_up(f"did not end within {self._timeout_s:g} s")
        if self._failures() or any(self.folder.glob("rank-*.json")) or any(map(self._left, self._pids)):
            self._fail()

    def stopped_while_starting(self, number: signal.Signals) -> NoReturn:
        """Leave, after a signal that came before any rank could have had something to save.

        Args:
            number: SIGINT interrupts; any other preempts.
        """
        if number is signal.SIGINT:
            self._interrupt()
        raise Ended("preempted")

    def failed(self, exit_codes: Mapping[int, int]) -> NoReturn:
        """Take over a failure that the agent saw between two looks.

        Args:
            exit_codes: The exit code of each failed rank.
        """
        for rank, code in exit_codes.items():
            self._endings.setdefault(rank, Ending(rank=rank, exit_code=code, time_ns=time.time_ns()))
        self._reaped.update(self._pids)  # the agent has ended the others
        self._fail()

    def _finish(self) -> NoReturn:
        """See the processes out, after all functions have returned."""
        if not self._wait(self.grace_s):
            log.warning("ranks %s had to be killed: they had finished, but did not exit", sorted(self._running()))
            self._send(signal.SIGKILL)
        raise Ended("preempted" if self.signals.terminate else "finished")

    def _done(self, rank: int) -> bool:
        return (self.folder / f"rank-{rank}.finished").exists()

    def _left(self, rank: int) -> bool:
        """Return whether a rank that found no place for a file of its own has said why it ends."""
        return bool(left_reason(self.folder, rank))

    def _failures(self) -> tuple[Ending, ...]:
        return tuple(ending for ending in self._endings.values() if not self._done(ending.rank))

    def _fail(self) -> NoReturn:
        """End all ranks, find out who was first, and leave."""
        self._end_peers()
        report = root_cause(self.folder, self._failures(), world_size=self.num_ranks)
        assert report is not None, "a rank ended, or wrote its failure"
        if self.signals.interrupt:
            self._interrupt()
        if self.signals.terminate and self._stopped_before_a_step():
            raise Ended("preempted")
        if report.kind in ("user", "machine") or self.signals.terminate or self.num_restarts == self.max_restarts:
            raise Ended("failed", report)
        self.num_restarts += 1
        text, before = report.render().rstrip(), self.num_ranks
        # The lost rank stands for its hardware: where a smaller world is stated, the run goes on without it.
        self.num_ranks = next_smaller(self._sizes, before)
        on = f" on {self.num_ranks} instead of {before}" if self.num_ranks != before else ""
        log.warning("%s\nrestarting all ranks%s (%d of %d)", text, on, self.num_restarts, self.max_restarts)
        raise Restart

    def _end_peers(self) -> None:
        """Wait for the ranks that lost another to report it, then end them; later endings mean nothing."""
        limit = time.monotonic() + _REPORT_S
        while not self._wait(_PEERS_S):
            if not self._reporting() or self.signals.interrupt or time.monotonic() > limit:
                break
        else:
            return
        before = dict(self._endings)
        self._send(signal.SIGTERM)
        limit = time.monotonic() + self.grace_s
        while not self._wait(_TERM_S) and self._saving() and time.monotonic() < limit:
            pass
        self._send(signal.SIGKILL)
        self._wait(_TERM_S)
        self._endings = before

    def _wait(self, seconds: float) -> bool:
        """Wait until all ranks have ended; return whether they have."""
        deadline = time.monotonic() + seconds
        while True:
            self._collect()
            if not self._running():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)

    def _collect(self) -> None:
        """Note the ranks that have ended; they stay for the agent to reap."""
        for rank, pid in self._running().items():
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # reaped by the agent, which tells of any exit code but 0
                code = 0
            else:
                if ended is None:
                    continue
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._endings[rank] = Ending(rank=rank, exit_code=code, time_ns=time.time_ns() - int(POLL_S * 1e9))

    def _send(self, number: signal.Signals) -> None:
        for pid in self._running().values():
            kill(pid, number)

    def _running(self) -> dict[int, int]:
        """Return the processes that have not ended, by rank."""
        return {rank: pid for rank, pid in self._pids.items() if rank not in self._endings and rank not in self._reaped}

    def _reporting(self) -> bool:
        files = [(self.folder / f"rank-{rank}.{NOTICE}", self.folder / f"rank-{rank}.json") for rank in self._running()]
        return any(notice.exists() and not report.exists() for notice, report in files)

    def _saving(self) -> bool:
        seen = [LastSeen.read(self.folder, rank) for rank in self._running()]
        return any(last is not None and last.phase is RunPhase.SAVING for last in seen)

    def _stopped_before_a_step(self) -> bool:
        """Return whether SIGTERM only met ranks that were still starting: then there is nothing to save."""
        seen = [LastSeen.read(self.folder, rank) for rank in self._pids]
        return all(ending.exit_code == -signal.SIGTERM for ending in self._failures()) and all(
            last is None or last.step is None for last in seen
        )

    def _interrupt(self) -> NoReturn:
        self._send(signal.SIGINT)
        self._wait(_INTERRUPT_S)
        self._send(signal.SIGKILL)
        raise Ended("interrupted", self._about_all("interrupted", "interrupted"))

    def _give_up(self, message: str) -> NoReturn:
        running = self._running()
        steps = {rank: last.step for rank in running if (last := LastSeen.read(self.folder, rank)) is not None}
        where = ", ".join(f"rank {rank} at step {'-' if step is None else step}" for rank, step in steps.items())
        report = self._about_all("stuck", f"{len(running)} of {self.num_ranks} ranks {message} ({where})")
        self._send(signal.SIGTERM)
        self._wait(_TERM_S)
        self._send(signal.SIGKILL)
        raise Ended("failed", report)

    def _about_all(self, kind: FailureKind, message: str) -> FailureReport:
        anyone = Ending(rank=0, exit_code=None, time_ns=time.time_ns())
        report = FailureReport.from_ending(anyone, world_size=self.num_ranks, folder=self.folder)
        return replace(report, rank=None, pid=os.getpid(), kind=kind, message=message, phase=None)
