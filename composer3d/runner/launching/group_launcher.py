"""The local world of several groups of ranks: each started by a process of its own, and again where it is lost."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from composer3d.processes import fork, temporary_folder
from composer3d.replicas import ADDRESS, ATTEMPT, GROUP, TOKEN, QuorumServer, ReplicaPolicy
from composer3d.runner.launching.launcher import LaunchResult, run_world
from composer3d.runner.launching.lock import RunLock
from composer3d.runner.launching.signals import ParentSignals, kill
from composer3d.runner.launching.watch import POLL_S, Ended, Watch
from composer3d.runner.reporting.failures import Ending, FailureReport

__all__ = ["launch_groups"]

_GRACE_S = 10.0  # beyond that of the ranks, for the processes that watch them

log = logging.getLogger(__name__)


def launch_groups(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    policy: ReplicaPolicy,
    num_groups: int,
    num_ranks: int,
    device: Literal["cpu", "cuda"],
    output: Path,
    max_restarts: int = 0,
    grace_s: float = 30.0,
) -> LaunchResult:
    """Run a function on several groups of ranks of this machine, and wait until one group has come to the end.

    This process knows who takes part in a step; for each group it forks one that starts the group's ranks as
    `launch_local` does. A group of which a rank is lost is started again while the others go on. Where none is left,
    all are started again from the last checkpoint, `max_restarts` times. Nothing listens but a socket in a folder that
    this user alone can enter, and the ranks' backends on loopback.

    Args:
        function: What each rank runs; see `launch_local`.
        args: Its arguments.
        policy: Of the groups.
        num_groups: Groups to start.
        num_ranks: Ranks of each.
        device: Where the ranks compute.
        output: The run's folder, held by a lock.
        max_restarts: How often all groups are started again after all were lost.
        grace_s: Seconds the ranks have after a SIGTERM.

    Returns:
        How the run ended; `values` are those of one group.

    Raises:
        ForkError: This process has run tensor operators, so forked ranks would hang.
        LockError: Another run holds the output folder.

    Memory: small. Collectives: none.
    """
    from composer3d.processes import prewarm, refuse_unsafe_fork

    if device == "cpu":
        prewarm()
    refuse_unsafe_fork()
    options: dict[str, Any] = {"policy": policy, "device": device, "max_restarts": max_restarts, "grace_s": grace_s}
    with ExitStack() as stack:
        private = stack.enter_context(temporary_folder("launch"))
        lock = stack.enter_context(RunLock(output, attempts=private))
        (output / "error.json").unlink(missing_ok=True)
        work = function, tuple(args), output
        groups = _Groups(work, num_groups=num_groups, num_ranks=num_ranks, private=private, lock=lock, **options)
        stack.callback(groups.close)
        result = groups.run()
        if result.report is not None:
            result.report.write_error_json(output)
        return result


class _Groups:
    """The groups of one run."""

    def __init__(
        self,
        work: tuple[Callable[..., Any], tuple[Any, ...], Path],
        *,
        policy: ReplicaPolicy,
        num_groups: int,
        num_ranks: int,
        device: Literal["cpu", "cuda"],
        private: Path,
        lock: RunLock,
        max_restarts: int,
        grace_s: float,
    ) -> None:
        self._work, self._policy, self._device = work, policy, device
        self._num_groups, self._num_ranks = num_groups, num_ranks
        self._private, self._lock, self._grace_s = private, lock, grace_s
        self._max_restarts, self._num_restarts = max_restarts, 0
        self._name, self._address = uuid.uuid4().hex, str(private / "quorum")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._address)
        listener.listen(num_groups * num_ranks)
        self._server = QuorumServer(
            listener, policy, num_groups=num_groups, num_ranks=num_ranks, token=self._name, lost=self._kill
        )
        self._signals = ParentSignals()
        self._attempts = dict.fromkeys(range(num_groups), 0)
        self._in_a_row = dict.fromkeys(range(num_groups), 0)
        self._seen = dict.fromkeys(range(num_groups), 0)  # commits of a group when it was started
        self._pids: dict[int, int] = {}
        self._done: dict[int, LaunchResult] = {}
        self._reports: list[tuple[int, FailureReport]] = []  # with the group's last committed step
        self._kill_at = float("inf")

    def run(self) -> LaunchResult:
        """Start all groups, and stay until the run has ended."""
        self._signals.install()
        try:
            for group in range(self._num_groups):
                self._start(group)
            while True:
                self._server.serve(POLL_S)
                self._look()
        except Ended as ended:
            return self._result(ended)
        finally:
            self._end_all()
            self._signals.restore()

    def close(self) -> None:
        """Close the socket."""
        self._server.close()

    # ---- starting ----------------------------------------------------------------------------------------------------

    def _start(self, group: int) -> None:
        """Fork the process that starts a group's ranks."""
        attempt = self._attempts[group]
        self._server.expect(group, attempt)
        self._seen[group] = self._server.membership.committed_by.get(group, 0)
        pid = fork()
        if pid == 0:
            self._watch_group(group, attempt)
        self._pids[group] = pid
        self._signals.pids = tuple(self._pids.values())

    def _watch_group(self, group: int, attempt: int) -> NoReturn:
        """Start a group's ranks and wait for them, in a process of its own; leave how it ended in a file."""
        code = 1
        try:
            self._server.close(in_child=True)
            os.setpgid(0, 0)  # Ctrl-C of a terminal reaches the parent, which passes it on once
            os.environ |= {
                ADDRESS: self._address,
                TOKEN: self._name,
                GROUP: str(group),
                ATTEMPT: str(attempt),
                **self._devices(group),
            }
            watch = Watch(
                private=self._private,
                num_ranks=self._num_ranks,
                max_restarts=0,
                timeout_s=None,
                grace_s=self._grace_s,
                run_id=f"{self._name}-{group}",
                attempt=attempt,
            )
            result = run_world(watch, "fork" if self._device == "cpu" else "spawn", self._work, self._lock)
            file = self._file(group, attempt)
            beside = file.with_suffix(".tmp")
            beside.write_bytes(pickle.dumps(result))
            beside.rename(file)
            code = 0
        except BaseException:
            log.exception("group %d: the process that watches its ranks failed", group)
        finally:
            os._exit(code)

    def _devices(self, group: int) -> dict[str, str]:
        """Return the variable by which a group sees its own GPUs alone: its ranks number them from 0."""
        if self._device == "cpu":
            return {}
        import torch

        stated = os.environ.get("CUDA_VISIBLE_DEVICES")
        every = stated.split(",") if stated else [str(number) for number in range(torch.cuda.device_count())]
        own = every[group * self._num_ranks : (group + 1) * self._num_ranks]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}

    def _file(self, group: int, attempt: int) -> Path:
        return self._private / f"group-{group}-{attempt}.result"

    # ---- watching ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at the processes, and act on signals and limits; raise once the run has ended."""
        for group, pid in list(self._pids.items()):
            # The end of one before it may have ended this one too, and started the group again.
            if self._pids.get(group) == pid and os.waitpid(pid, os.WNOHANG)[0]:
                self._pids.pop(group)
                self._ended(group)
        membership = self._server.membership
        if self._done and (not self._pids or membership.is_finished):
            raise Ended(next(iter(self._done.values())).outcome)
        if self._signals.interrupt:
            self._send(signal.SIGINT)
            self._await_all(self._grace_s)
            raise Ended("interrupted", self._about_all("interrupted"))
        if self._signals.terminate and self._kill_at == float("inf"):
            self._kill_at = time.monotonic() + self._grace_s + _GRACE_S
            self._send(signal.SIGTERM)
        if not self._pids:
            raise Ended("failed", self._cause())
        if time.monotonic() > self._kill_at:
            raise Ended("failed", self._about_all(f"groups did not stop within {self._grace_s:g} s after SIGTERM"))
        if self._server.short_for() > self._policy.join_s:
            self._too_few()

    def _ended(self, group: int) -> None:
        """Act on the end of a group."""
        file = self._file(group, self._attempts[group])
        result: LaunchResult | None = pickle.loads(file.read_bytes()) if file.exists() else None
        if result is not None and result.report is None:
            self._done[group] = result
            return
        report = None if result is None else result.report
        self._server.lose(group, "a rank of it has ended")
        membership = self._server.membership
        if report is not None:
            self._reports = [*self._unsurvived(), (membership.committed_by.get(group, 0), report)]
            is_crash = report.kind == "crash" and not report.consequence and report.error != "ReplicaError"
            if report.kind in ("user", "machine") or (is_crash and not membership.num_committed):
                raise Ended("failed", report)
        if self._signals.terminate or self._signals.interrupt or membership.is_finished:
            return
        if membership.is_lost:
            return self._begin_again(group)
        if membership.committed_by.get(group, 0) > self._seen[group]:
            self._in_a_row[group] = 0
        self._in_a_row[group] += 1
        self._tell(group, report)
        if self._in_a_row[group] <= self._policy.restarts:
            self._attempts[group] += 1
            self._start(group)

    def _tell(self, group: int, report: FailureReport | None) -> None:
        """Say that a group is lost, and what happens now."""
        reason = self._server.membership.reasons.get(group, "")
        text = report.render().rstrip().removeprefix("run failed: ") if report is not None else reason
        left = len(self._server.membership.left)
        again = self._in_a_row[group] <= self._policy.restarts
        log.warning(
            "group %d is lost: %s\n%d of %d groups go on%s",
            group,
            text or "its processes have ended",
            left,
            self._num_groups,
            ", and it is started again"
            if again
            else f"; it was started {self._policy.restarts} times without a step, and is not started again",
        )

    def _begin_again(self, group: int) -> None:
        """Start all groups again from the last checkpoint, after the last one that had the state was lost."""
        report = self._cause()
        if self._num_restarts == self._max_restarts:
            raise Ended("failed", replace(report, message=f"{report.message}; no group is left that has the state"))
        self._num_restarts += 1
        log.warning(
            "%s\nno group is left that has the state: starting all from the last checkpoint (%d of %d)",
            report.render().rstrip(),
            self._num_restarts,
            self._max_restarts,
        )
        self._end_all()
        self._server.begin_again()
        self._reports.clear()
        for each in range(self._num_groups):
            self._attempts[each] += 1
            self._start(each)

    def _too_few(self) -> None:
        """Begin without the groups that did not come, or end."""
        membership = self._server.membership
        if not membership.has_begun:
            self._server.go_without_the_rest()
        if not membership.has_begun or self._server.short_for() > self._policy.join_s:
            raise Ended(
                "failed",
                self._about_all(f"fewer than {self._policy.minimum} groups are there after {self._policy.join_s:g} s"),
            )

    # ---- ending ------------------------------------------------------------------------------------------------------

    def _unsurvived(self) -> list[tuple[int, FailureReport]]:
        """Return the failures after which no group has made a step."""
        return [each for each in self._reports if each[0] == self._server.membership.num_committed]

    def _cause(self) -> FailureReport:
        """Return what failed first since the last step that a group has made."""
        reports = [report for _, report in self._unsurvived()]
        causes = [report for report in reports if not report.consequence] or reports
        return min(causes, key=lambda report: report.time_ns) if causes else self._about_all("every group is lost")

    def _result(self, ended: Ended) -> LaunchResult:
        values = next((result.values for result in self._done.values() if result.values), {})
        restarts = sum(self._attempts.values())
        return LaunchResult(outcome=ended.outcome, report=ended.report, values=values, num_restarts=restarts)

    def _kill(self, group: int, reason: str) -> None:
        """End the processes of a group that was taken out."""
        if group in self._pids:
            kill(self._pids[group], signal.SIGKILL)  # its ranks go with it, those that were stopped too

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids.values():
            kill(pid, number)

    def _await_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._pids and time.monotonic() < deadline:
            self._pids = {group: pid for group, pid in self._pids.items() if not os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.01)

    def _end_all(self) -> None:
        self._send(signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        self._pids.clear()

    def _about_all(self, message: str) -> FailureReport:
        anyone = Ending(rank=0, exit_code=None, time_ns=time.time_ns())
        report = FailureReport.from_ending(anyone, world_size=self._num_ranks, folder=self._private)
        kind: Literal["interrupted", "stuck"] = "interrupted" if message == "interrupted" else "stuck"
        return replace(report, rank=None, pid=os.getpid(), kind=kind, message=message, phase=None)
