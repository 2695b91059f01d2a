"""Decisions about groups of ranks that come and go: starts, restarts, losses of machines, and the end of the run."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer3d.replicas import Connection, QuorumServer, Refusal, ReplicaPolicy
from composer3d.runner.launching.group_failures import GroupFailures, loss_of
from composer3d.runner.launching.group_starts import GroupStarts
from composer3d.runner.launching.group_takeover import Sharing, take_over
from composer3d.runner.launching.known_run import KnownRun
from composer3d.runner.launching.launcher import LaunchResult
from composer3d.runner.launching.local_groups import LocalGroups
from composer3d.runner.launching.node_place import NodeMeeting, same_number
from composer3d.runner.launching.remote_nodes import Part, RemoteNode
from composer3d.runner.launching.seat import Fenced, Seat
from composer3d.runner.launching.watch import POLL_S, Ended
from composer3d.runner.reporting.failures import FailureReport

__all__ = ["Coordinator"]

_GRACE_S = 10.0  # beyond that of the ranks, for the processes that watch them
_LEAVE_S = 10.0  # for other machines to end, after the run has

log = logging.getLogger(__name__)


class Coordinator:
    """Knows who takes part in a step, and decides what is started again; on the machine that holds the run's lock.

    Groups are divided over machines in order. Those of this one are started by calls, those of others by messages.

    Args:
        listener: Socket of the membership server, closed with it.
        policy: Of the groups.
        token: Of the run.
        num_groups: Of all machines.
        num_ranks: Ranks per group.
        private: This launcher's private folder.
        max_restarts: How often all groups are started again after all were lost.
        grace_s: Seconds the ranks have after a SIGTERM.
        meeting: What other machines are compared with; None where there is none.
        seat: Of this machine, where another one may take over from it.
        known: What a lost coordinator knew, from which this one takes over.
    """

    def __init__(
        self,
        listener: socket.socket,
        policy: ReplicaPolicy,
        *,
        token: str,
        num_groups: int,
        num_ranks: int,
        private: Path,
        max_restarts: int,
        grace_s: float,
        meeting: NodeMeeting | None = None,
        seat: Seat | None = None,
        known: KnownRun | None = None,
    ) -> None:
        self._policy, self._grace_s = policy, grace_s
        self._seat, self._known = seat, known
        self._num_groups, self._num_ranks = num_groups, num_ranks
        self._max_restarts, self._starts = max_restarts, GroupStarts(num_groups)
        self._sharing = None if seat is None else Sharing(seat, self._starts)
        self._meeting = meeting
        self._own = 0 if meeting is None else meeting.own
        self._groups_each = num_groups if meeting is None else num_groups // meeting.count
        options: dict[str, Any] = {"num_groups": num_groups, "num_ranks": num_ranks, "token": token}
        options |= {"admit": None if meeting is None else self._admit, "takes_over": known is not None}
        self._server = QuorumServer(listener, policy, lost=self._expelled, **options)
        self._nodes: dict[int, RemoteNode] = {}  # that have greeted, ready or not
        self._done: dict[int, LaunchResult] = {}
        self._failures = GroupFailures(private, num_ranks)
        self._kill_at = float("inf")
        self._has_ended = False

    def run(self, local: LocalGroups) -> LaunchResult:
        """Start all groups, and stay until the run has ended on all machines.

        Args:
            local: The groups of this machine.
        """
        with local.taking_signals():
            return self.go_on(local)

    def go_on(self, local: LocalGroups) -> LaunchResult:
        """Do as `run`, where signals are taken already; with the groups that run, if it takes over.

        Args:
            local: The groups of this machine.
        """
        self._local = local
        try:
            if self._known is not None and self._seat is not None:
                self._take_over(self._known, self._seat)
            for group in range(self._num_groups):
                if group not in self._starts.running and group not in self._done and self._may_start(group):
                    self._start(group)
            while True:
                self._server.serve(POLL_S)
                self._look()
        except Ended as ended:
            result = self._result(ended)
        except Fenced as fenced:
            result = self._fenced(fenced)
        local.end_all()
        self._end_nodes(result)
        return result

    def close(self) -> None:
        """Close the server's sockets."""
        self._server.close()

    def close_in_child(self) -> None:
        """Close them in a forked process, without notifying anybody."""
        self._server.close(in_child=True)

    # ---- starting ----------------------------------------------------------------------------------------------------

    def _part(self, group: int) -> Part | None:
        """Return the machine of a group; None while it is not there."""
        rank = group // self._groups_each
        if rank == self._own:
            return self._local
        node = self._nodes.get(rank)
        return node if node is not None and node.is_ready else None

    def _start(self, group: int) -> None:
        """Have a group started, once more if it was before, where its machine is there."""
        part = self._part(group)
        if part is None:
            return
        self._starts.attempts[group] += 1
        self._server.expect(group, self._starts.attempts[group])
        self._starts.seen[group] = self._server.membership.committed_by.get(group, 0)
        self._starts.running[group] = self._starts.attempts[group]
        part.start(group, self._starts.attempts[group])

    # ---- taking over -------------------------------------------------------------------------------------------------

    def _take_over(self, known: KnownRun, seat: Seat) -> None:
        """Go on with the machines and groups that are left; begin again, where none of them has the state."""
        self._starts.running = self._local.running
        for ended in self._local.finished:
            self.group_ended(*ended)
        take_over(known, server=self._server, seat=seat, starts=self._starts, policy=self._policy, look=self._gather)
        if self._server.membership.is_lost and not self._done:
            self._begin_again()

    def _gather(self) -> set[int]:
        """Handle messages for a moment, before it is known which groups go on; return the machines that are there."""
        self._server.serve(POLL_S)
        for ended in self._local.ended():
            self.group_ended(*ended)
        return {self._own, *(node.rank for node in self._nodes.values() if node.is_ready)}

    def _fenced(self, fenced: Fenced) -> LaunchResult:
        """Return how this machine ends, after another one has taken over."""
        report = self._failures.about_all(fenced.of(self._own), is_recorded=False)
        report = replace(report, kind="parted", advice=fenced.advice)
        return LaunchResult(outcome="failed", report=report, is_passing=True)

    # ---- other machines ----------------------------------------------------------------------------------------------

    def _admit(self, message: Mapping[str, Any], connection: Connection) -> RemoteNode | Refusal:
        """Let a machine in, or return why not."""
        assert self._meeting is not None
        rank, name = int(message["node"]), str(message["name"])[:200]
        refused = self._meeting.objection(message)
        if refused is not None:
            if not refused.again:
                log.warning("node %d (%s) is not let in: %s", rank, name, refused.reason)
            return refused
        if rank in self._nodes:
            return same_number(str(self._nodes[rank]), name, rank)
        if self._has_ended:
            return Refusal("the run has ended")
        groups = range(rank * self._groups_each, (rank + 1) * self._groups_each)
        running = {int(group): int(attempt) for group, attempt in message.get("running", {}).items()}
        node = RemoteNode(connection, rank=rank, name=name, groups=groups, coordinator=self, running=running)
        welcome: dict[str, Any] = {"do": "welcome", "mark": self._meeting.mark, "endpoints": self._meeting.endpoints}
        if self._seat is not None:
            welcome |= self._seat.admit(rank, str(message["identity"])[:100])
        self._nodes[rank] = node
        connection.send(welcome)
        return node

    def node_came(self, node: RemoteNode) -> None:
        """Start the groups of a machine that is ready."""
        log.info("%s is there", node)
        if self._server.standings is not None:  # it is known later what becomes of its groups
            self._starts.running |= node.running
            return
        if self._local.signals.terminate or self._has_ended:
            return
        for group in node.groups:
            self._starts.in_a_row[group] = 0
            self._start(group)

    def node_leaves(self, node: RemoteNode) -> None:
        """Let a machine leave that was asked to stop; where too few groups would be left, the run saves and stops."""
        left = [group for group in self._server.membership.left if group not in node.groups]
        if self._local.signals.terminate or self._has_ended:
            return
        if left and len(left) >= self._policy.minimum:
            node.end(LaunchResult(outcome="preempted", is_passing=True))
            node.dismiss("it was asked to stop")
        else:
            log.warning(
                "%s was asked to stop; without its groups %d would be left, and a step needs %d: the run is saved, and "
                "stops on all machines",
                node,
                len(left),
                max(1, self._policy.minimum),
            )
            self._local.signals.terminate = True

    def node_lost(self, node: RemoteNode, reason: str) -> None:
        """Go on without a machine and its groups, or begin again where they alone had the state."""
        if self._nodes.get(node.rank) is node:
            self._nodes.pop(node.rank)
        if self._has_ended:
            return
        if self._seat is not None and self._server.standings is None:
            self._seat.left(node.rank)
        had = [group for group in node.groups if self._starts.running.pop(group, None) is not None]
        for group in had:
            self._server.lose(group, f"{node} is lost: {reason}")
        membership = self._server.membership
        log.warning(
            "%s is lost: %s\nof its groups %s ran; %d of %d groups go on, and it may come again",
            node,
            reason,
            ", ".join(map(str, had)) or "none",
            len(membership.left),
            self._num_groups,
        )
        if membership.is_lost and not self._local.signals.terminate and self._server.standings is None:
            self._begin_again()

    # ---- watching ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at the groups, and act on signals and limits; raise once the run has ended."""
        for ended in self._local.ended():
            self.group_ended(*ended)
        if self._sharing is not None:
            there = [node for node in self._nodes.values() if node.is_ready]
            self._sharing.share(self._server.membership, there)
        membership, signals = self._server.membership, self._local.signals
        if self._done and (not self._starts.running or membership.is_finished):
            raise Ended(next(iter(self._done.values())).outcome)
        if signals.interrupt:
            self._send(signal.SIGINT)
            self._local.wait(self._grace_s)
            raise Ended("interrupted", self._failures.about_all("interrupted"))
        if signals.terminate and self._kill_at == float("inf"):
            self._kill_at = time.monotonic() + self._grace_s + _GRACE_S
            self._send(signal.SIGTERM)
        if not self._starts.running:
            raise Ended("failed", self._failures.cause(self._server.membership.num_committed))
        if time.monotonic() > self._kill_at:
            raise Ended(
                "failed", self._failures.about_all(f"groups did not stop within {self._grace_s:g} s after SIGTERM")
            )
        if self._server.short_for() > self._policy.join_s:
            self._too_few()

    def group_ended(self, group: int, attempt: int, result: LaunchResult | None) -> None:
        """Act on the end of a group; of one that was started again since, nothing is done.

        Args:
            group: Number of the group.
            attempt: Number of its earlier starts.
            result: How it ended; None where its processes were killed.
        """
        if self._starts.running.get(group) != attempt or self._has_ended:
            return
        self._starts.running.pop(group)
        if result is not None and result.report is None:
            self._done[group] = result
            return
        report = None if result is None else result.report
        self._server.lose(group, "a rank of it has ended")
        membership, signals = self._server.membership, self._local.signals
        if report is not None:
            committed = membership.committed_by.get(group, 0)
            self._failures.add(report, committed=committed, num_committed=membership.num_committed)
            if self._is_everyones(group, report):
                raise Ended("failed", report)
        if signals.terminate or signals.interrupt or membership.is_finished:
            return
        if membership.is_lost:
            return self._begin_again()
        if membership.committed_by.get(group, 0) > self._starts.seen[group]:
            self._starts.in_a_row[group] = 0
        self._starts.in_a_row[group] += 1
        self._tell(group, report)
        if self._may_start(group):
            self._start(group)

    def _is_everyones(self, group: int, report: FailureReport) -> bool:
        """Return whether a failure would meet every group, and not this one or its machine alone."""
        has_committed = self._server.membership.num_committed > 0
        is_here = self._part(group) is self._local
        if report.kind in ("user", "machine"):
            return is_here or (report.kind == "user" and not has_committed)
        is_crash = report.kind == "crash" and not report.consequence and report.error != "ReplicaError"
        return is_crash and not has_committed

    def _may_start(self, group: int) -> bool:
        """Return whether a group has not been lost too often without a step in between."""
        return self._starts.in_a_row[group] <= self._policy.restarts

    def _tell(self, group: int, report: FailureReport | None) -> None:
        """Say that a group is lost, and what happens now."""
        text = loss_of(report) or self._server.membership.reasons.get(group) or "its processes have ended"
        then = f"; it was started {self._policy.restarts} times without a step, and is not started again"
        log.warning(
            "group %d is lost: %s\n%d of %d groups go on%s",
            group,
            text,
            len(self._server.membership.left),
            self._num_groups,
            ", and it is started again" if self._may_start(group) else then,
        )

    def _begin_again(self) -> None:
        """Start all groups again from the last checkpoint, after the last one that had the state was lost."""
        report = self._failures.cause(self._server.membership.num_committed)
        if self._starts.num_restarts == self._max_restarts:
            raise Ended("failed", replace(report, message=f"{report.message}; no group is left that has the state"))
        self._starts.num_restarts += 1
        log.warning(
            "%s\nno group is left that has the state: starting all from the last checkpoint (%d of %d)",
            report.render().rstrip(),
            self._starts.num_restarts,
            self._max_restarts,
        )
        for group in self._starts.running:
            self._kill(group)
        self._starts.running.clear()
        self._local.end_all()
        self._server.begin_again()
        self._failures.clear()
        for each in range(self._num_groups):
            self._start(each)

    def _too_few(self) -> None:
        """Begin without the groups that did not come, or end."""
        membership = self._server.membership
        if not membership.has_begun:
            self._server.go_without_the_rest()
        if not membership.has_begun or self._server.short_for() > self._policy.join_s:
            raise Ended(
                "failed",
                self._failures.about_all(
                    f"fewer than {self._policy.minimum} groups are there after {self._policy.join_s:g} s"
                ),
            )

    # ---- ending ------------------------------------------------------------------------------------------------------

    def _result(self, ended: Ended) -> LaunchResult:
        values = next((result.values for result in self._done.values() if result.values), {})
        return LaunchResult(outcome=ended.outcome, report=ended.report, values=values, num_restarts=self._starts.total)

    def _end_nodes(self, result: LaunchResult) -> None:
        """Have other machines end as the run has, and wait for it: no rank is to write once the lock is given up."""
        self._has_ended = True
        for node in list(self._nodes.values()):
            node.dismiss("another machine serves the run") if result.is_passing else node.end(result)
        deadline = time.monotonic() + _LEAVE_S
        while self._nodes and time.monotonic() < deadline:
            self._server.serve(POLL_S)

    def _expelled(self, group: int, reason: str) -> None:
        """End the processes of a group that was taken out."""
        if group in self._starts.running:
            self._kill(group)

    def _kill(self, group: int) -> None:
        part = self._part(group)
        if part is not None:
            part.kill(group)

    def _send(self, number: signal.Signals) -> None:
        parts: list[Part] = [self._local, *(node for node in self._nodes.values() if node.is_ready)]
        for part in parts:
            part.send(number)
