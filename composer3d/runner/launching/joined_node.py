"""A machine that starts groups of ranks as another one, the coordinator, has it."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer3d.errors import ComposerError, NodeZeroError, NumberTakenError
from composer3d.replicas import TOKEN, ReplicaPolicy, connect
from composer3d.runner.launching.launcher import LaunchResult
from composer3d.runner.launching.local_groups import EndedGroup, LocalGroups
from composer3d.runner.launching.node_messages import result_from_json, result_to_json
from composer3d.runner.launching.node_place import NodePlace, host_name
from composer3d.runner.launching.seat import Fenced, Seat
from composer3d.runner.launching.successor import Successor
from composer3d.runner.launching.watch import POLL_S
from composer3d.runner.reporting.failures import Ending, FailureKind, FailureReport

__all__ = ["JoinedNode"]

_MOST_BYTES = 1 << 18  # of a line
_CONNECT_S, _AGAIN_S = 2.0, 0.2  # limit of one try to connect, and time between two
_GONE_S = 5.0  # tries to connect again to a coordinator whose connection has ended
_FOLDER_S = 15.0  # until what another machine has written is seen on a shared disk
_ANSWER_S = 2.0  # of one among several that may serve, to the greeting
_BEATS = 5  # within the time after which the coordinator is silent
_STALL_S = 1.0  # a pause of this process, in which it heard nothing

log = logging.getLogger(__name__)


class _Over(Exception):
    """Leaves the loop: the run has ended, or this machine has left it."""

    def __init__(self, result: LaunchResult) -> None:
        self.result = result
        super().__init__(result.outcome)


class JoinedNode:
    """Greets the coordinator, and starts, ends and reports groups as it says, until the run has ended.

    Where the connection ends, the groups end too, and the machine comes again; where nobody answers any more, it ends.
    Where several machines may serve, the groups go on, and this machine looks for the one that serves now, or takes
    over itself.

    Args:
        place: Of this machine.
        policy: Of the groups.
        token: Of the run.
        fingerprint: Versions and manifest of this machine.
        output: The run's folder, which must be the coordinator's.
        private: This launcher's private folder.
        grace_s: Seconds the ranks have after a SIGTERM.
        successor: Where several machines may serve.
        succeed: Serves in place of a lost coordinator; given this machine's seat.
        join_s: Seconds within which the coordinator is to answer first; by default those of the policy.
    """

    def __init__(
        self,
        place: NodePlace,
        *,
        policy: ReplicaPolicy,
        token: str,
        fingerprint: Mapping[str, str],
        output: Path,
        private: Path,
        grace_s: float,
        successor: Successor | None = None,
        succeed: Callable[[Successor, Seat, LocalGroups], LaunchResult] | None = None,
        join_s: float | None = None,
    ) -> None:
        self._successor, self._succeed = successor, succeed
        self._patience_s = policy.silent_s if successor is None else policy.patience_s
        self._place, self._policy, self._output, self._private = place, policy, output, private
        self._grace_s = grace_s
        self._greeting: dict[str, Any] = {"do": "node", "token": token, "node": place.rank, "nodes": place.count}
        self._greeting |= {"name": host_name(), "fingerprint": dict(fingerprint), "endpoints": place.endpoints}
        self._greeting |= {} if successor is None else {"identity": successor.identity}
        self._socket: socket.socket | None = None
        self._received = b""
        self._heard = self._beat_at = self._looked = self._try_at = 0.0
        self._answer_by = float("inf")
        self._give_up_at = time.monotonic() + (policy.join_s if join_s is None else join_s)
        self._was_welcome = self._is_welcome = False  # by any coordinator, and by this one
        self._asked, self._is_last = place.endpoint, True  # of those that may serve
        self._refused_until: float | None = None
        self._mark: tuple[Path, float] | None = None  # file to be found, and until when
        self._kill_at = float("inf")

    def run(self, local: LocalGroups) -> LaunchResult:
        """Take part until the run has ended; return how.

        Args:
            local: The groups of this machine.

        Raises:
            ComposerError: The coordinator does not answer, or refuses this machine.
        """
        self._local = local
        with local.taking_signals():
            try:
                while True:
                    self._look()
                    self._act_on_signals()
                    if self._socket is None:
                        self._come()
                    else:
                        self._hear(POLL_S)
            except _Over as over:
                return over.result
            except Fenced as fenced:
                return self._fenced(fenced)
            finally:
                local.end_all()
                self.close_all()

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close_all(self) -> None:
        """Close the connection, and give up the place where this machine would serve."""
        self.close()
        if self._successor is not None:
            self._successor.close()

    # ---- connection --------------------------------------------------------------------------------------------------

    def _come(self) -> None:
        """Connect and greet, if it is time to try."""
        now = time.monotonic()
        if now < self._try_at:
            time.sleep(POLL_S)
            return
        is_last = True
        if self._successor is not None:
            self._asked, is_last = self._successor.next_address()
        try:
            self._socket = connect(self._asked, timeout_s=_CONNECT_S)
        except OSError as error:
            return self._unanswered(error, is_last=is_last)
        self._received, self._mark, self._is_last = b"", None, is_last
        self._heard = self._looked = time.monotonic()
        self._beat_at = self._heard + self._policy.silent_s / _BEATS
        running = {}
        if self._successor is not None:
            self._answer_by = self._heard + _ANSWER_S
            running = {"running": {str(group): attempt for group, attempt in self._local.running.items()}}
        self._send({**self._greeting, **running})

    def _unanswered(self, error: OSError, *, is_last: bool) -> None:
        """Go on to the next one that may serve; after the last one, take over if it is this machine's turn."""
        if not is_last:
            return
        obstacle = None if self._successor is None else self._successor.obstacle
        if obstacle is not None and self._refused_until is None:  # and nobody there who would say why
            raise obstacle
        if self._successor is not None and self._was_welcome:
            seat = self._successor.claim()
            if seat is not None and self._succeed is not None:
                self.close()
                raise _Over(self._succeed(self._successor, seat, self._local))
        if time.monotonic() > self._give_up_at:
            raise self._nobody(error) from error
        self._try_at = time.monotonic() + _AGAIN_S

    def _nobody(self, error: OSError) -> _Over | ComposerError:
        where = self._place.endpoint
        if not self._was_welcome:
            return NodeZeroError(f"{where}: node 0 did not answer within {self._policy.join_s:g} s ({error})")
        report = self._report(
            "stuck", f"{self._server}, which knows who takes part in a step, is gone: {where} does not answer"
        )
        advice = "start all machines again with the same commands: the run goes on from its newest checkpoint"
        return _Over(LaunchResult(outcome="failed", report=replace(report, advice=advice), is_passing=True))

    def _lost(self, reason: str) -> None:
        """Come again; end the groups, whose ranks are not in the run any more, where nobody else may serve."""
        self.close()
        now = time.monotonic()
        if self._successor is None:
            self._local.end_all()
        if self._was_welcome and (self._successor is None or self._is_welcome):
            log.warning("the connection to %s has ended: %s", self._server, reason)
            self._give_up_at = now + (_GONE_S if self._successor is None else self._policy.takeover_s)
        if self._successor is not None and self._is_welcome:
            self._successor.lost()
        elif self._successor is not None and self._is_last:
            self._unanswered(ConnectionError(reason), is_last=True)
        self._is_welcome = False
        self._try_at = now

    @property
    def _server(self) -> str:
        if self._successor is not None and not self._was_welcome:
            return "the machine that serves the run"
        return f"node {0 if self._successor is None else self._successor.server}"

    @property
    def _is_connected(self) -> bool:
        return self._socket is not None

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._socket is None:
            return
        self._socket.settimeout(_CONNECT_S)
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode())
        except OSError as error:
            self._lost(str(error))

    def _hear(self, seconds: float) -> None:
        """Take messages for a time, send heartbeats, and note a coordinator that is silent."""
        assert self._socket is not None
        self._socket.settimeout(seconds)
        try:
            data = self._socket.recv(_MOST_BYTES)
        except TimeoutError:
            return self._watch()
        except OSError as error:
            return self._lost(str(error))
        if data and self._successor is not None:
            self._successor.answered()
        if not data and not self._was_welcome and self._successor is None:
            raise ComposerError(
                f"{self._place.endpoint}: the connection was ended without an answer: either {TOKEN} is not that of "
                "node 0, or this is not the --endpoint of node 0"
            )
        if not data:
            return self._lost("it was closed")
        self._heard = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _MOST_BYTES:
            return self._lost(f"{self._server} sent a line without an end")
        for line in lines:
            try:
                self._take(json.loads(line))
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                return self._lost(f"{self._server} sent what is no message ({error})")
            if not self._is_connected:
                return
        self._watch()

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._looked > _STALL_S:  # this process was paused itself
            self._heard += now - self._looked
        self._looked = now
        if now - self._heard > self._patience_s:
            return self._lost(f"{self._server} was not heard of for {self._patience_s:g} s")
        if not self._is_welcome and now > self._answer_by:
            return self._lost("it does not answer")
        if now > self._beat_at:
            self._beat_at = now + self._policy.silent_s / _BEATS
            self._send({"do": "beat"})
        self._find_folder(now)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _take(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the coordinator."""
        kind = message["do"]
        if kind == "welcome":
            self._was_welcome = self._is_welcome = True
            self._refused_until = None
            if self._successor is not None:
                self._successor.welcomed(message, self._output)
                self._local.know(self._asked)
            self._mark = self._output / Path(str(message["mark"])).name, time.monotonic() + _FOLDER_S
        elif kind == "start" and message["group"] in self._local.groups:
            self._local.start(int(message["group"]), int(message["attempt"]))
        elif kind == "kill":
            self._local.kill(int(message["group"]))
        elif kind == "signal":
            self._local.send(signal.Signals(message["number"]))
        elif kind == "end":
            raise _Over(result_from_json(message["result"]))
        elif kind == "refused":
            self._refused(str(message["reason"]), again=bool(message["again"]))
        elif kind == "known" and self._successor is not None:
            self._successor.told(message)
        elif kind == "out":
            self._lost(str(message["reason"]))
        elif kind != "beat":
            raise ValueError(kind)

    def _refused(self, reason: str, *, again: bool) -> None:
        """End, or try again while this machine's own connection of before may still count as one."""
        now = time.monotonic()
        if self._refused_until is None:
            self._refused_until = now + self._policy.silent_s + _GONE_S
        if not again or now > self._refused_until:
            kind = NumberTakenError if again else ComposerError
            raise kind(f"{self._asked}: {self._server} refuses this machine: {reason}")
        self.close()
        self._try_at = now + _AGAIN_S
        if self._successor is not None and self._is_last:
            self._unanswered(ConnectionError(reason), is_last=True)

    def _find_folder(self, now: float) -> None:
        """Say that this machine is ready once it has found what the coordinator has written."""
        if self._mark is None:
            return
        file, until = self._mark
        if file.exists():
            self._mark = None
            self._send({"do": "ready"})
            for ended in () if self._successor is None else self._local.finished:  # of which it may not know
                self._tell(ended)
        elif now > until:
            reason = (
                f"{self._output.absolute()} is not the folder that {self._server} writes to: of groups on several "
                "machines it must be on a disk that all of them share"
            )
            self._send({"do": "fail", "reason": reason})
            raise ComposerError(f"{reason}; give run.output a path that all machines have alike")

    # ---- groups and signals ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Tell the coordinator which groups have ended; while there is none, later."""
        if self._successor is not None and (not self._is_welcome or self._mark is not None):
            return
        for ended in self._local.ended():
            self._tell(ended)

    def _tell(self, ended: EndedGroup) -> None:
        told = None if ended.result is None else result_to_json(ended.result)
        self._send({"do": "ended", "group": ended.group, "attempt": ended.attempt, "result": told})

    def _act_on_signals(self) -> None:
        signals, now = self._local.signals, time.monotonic()
        if signals.interrupt:
            self._local.send(signal.SIGINT)
            self._local.wait(self._grace_s)
            raise _Over(LaunchResult(outcome="interrupted", report=self._report("interrupted", "interrupted")))
        is_alone = self._successor is not None and self._was_welcome and not self._is_welcome
        if is_alone:  # who serves then knows whether this machine may leave
            return
        if signals.terminate and self._socket is None:
            raise _Over(LaunchResult(outcome="preempted", is_passing=True))
        if signals.terminate and self._kill_at == float("inf"):
            self._kill_at = now + 2 * self._grace_s
            self._send({"do": "leave"})
        if now > self._kill_at:
            raise self._failed(f"groups did not stop within {2 * self._grace_s:g} s after SIGTERM")

    def _failed(self, message: str) -> _Over:
        return _Over(LaunchResult(outcome="failed", report=self._report("stuck", message)))

    def _fenced(self, fenced: Fenced) -> LaunchResult:
        report = replace(self._report("parted", fenced.of(self._place.rank)), advice=fenced.advice)
        return LaunchResult(outcome="failed", report=report, is_passing=True)

    def _report(self, kind: FailureKind, message: str) -> FailureReport:
        """Return a report of no rank, which stands in no file: the run's folder is the coordinator's."""
        anyone = Ending(rank=0, exit_code=None, time_ns=time.time_ns())
        report = FailureReport.from_ending(anyone, world_size=self._place.count, folder=self._private)
        return replace(report, rank=None, pid=os.getpid(), kind=kind, message=message, phase=None, is_recorded=False)
