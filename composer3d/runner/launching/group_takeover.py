"""Taking a run over from a machine that was lost: who is left, and what became of the step in flight."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from composer3d.replicas import Membership, QuorumServer, ReplicaPolicy
from composer3d.runner.launching.group_starts import GroupStarts
from composer3d.runner.launching.known_run import KnownRun
from composer3d.runner.launching.remote_nodes import RemoteNode
from composer3d.runner.launching.seat import Seat

__all__ = ["Sharing", "take_over"]

log = logging.getLogger(__name__)


class Sharing:
    """Has other machines know what one that takes over has to, whenever it changes.

    Args:
        seat: Of this machine.
        starts: Of the groups.
    """

    def __init__(self, seat: Seat, starts: GroupStarts) -> None:
        self._seat, self._starts = seat, starts
        self._told: tuple[KnownRun, frozenset[RemoteNode]] = KnownRun(), frozenset()

    def share(self, membership: Membership, nodes: Sequence[RemoteNode]) -> None:
        """Tell them, if there is something new; look whether another machine serves.

        Args:
            membership: Of the run.
            nodes: Machines that are there.

        Raises:
            Fenced: Another machine serves.
        """
        self._seat.check()
        there = sorted(node.rank for node in nodes)
        told = self._starts.known(membership, (self._seat.term.node, *there)), frozenset(nodes)
        if told == self._told:
            return
        self._told = told
        for node in nodes:
            node.tell({**told[0].to_json(), "term": self._seat.term.number})


def take_over(
    known: KnownRun,
    *,
    server: QuorumServer,
    seat: Seat,
    starts: GroupStarts,
    policy: ReplicaPolicy,
    look: Callable[[], set[int]],
) -> None:
    """Wait for machines and ranks that are left, and go on with them from the step in flight.

    Args:
        known: What the lost machine knew, as far as it has told.
        server: Of this machine, to which they come.
        seat: Of this machine.
        starts: Of the groups; those that run here are known.
        policy: Of the groups.
        look: Handles messages for a moment; returns the machines that are there.

    Raises:
        Fenced: Another machine has taken over.
    """
    assert server.standings is not None, "it takes over"
    starts.restore(known, server.membership)
    deadline, there = time.monotonic() + policy.gather_s, {seat.term.node}
    while not _is_gathered(known, server, seat, starts, there) and time.monotonic() < deadline:
        there = look()
    seat.left(*(set(seat.term.members) - there))
    for group in starts.attempts:
        attempt = starts.running.get(group, -1)
        server.expect(group, attempt)
        starts.attempts[group] = max(starts.attempts[group], attempt)
    server.resume(starts.running, term=seat.term.number, has_begun=known.has_begun)
    log.warning(
        "this machine, node %d, knows who takes part in a step from now on (term %d): groups %s go on, and machines %s "
        "are there",
        seat.term.node,
        seat.term.number,
        list(server.membership.left),
        sorted(there),
    )


def _is_gathered(known: KnownRun, server: QuorumServer, seat: Seat, starts: GroupStarts, there: set[int]) -> bool:
    """Return whether all machines are there that were, and all ranks of the groups that have the state."""
    standings = server.standings
    assert standings is not None
    groups = (set(known.left) | standings.with_state()) & set(starts.running)
    return set(seat.term.members) <= there and all(standings.is_whole(group) for group in groups)
