"""Starts of groups: which run, how often each was started, and what a machine that takes over has to know of it."""

from __future__ import annotations

from collections.abc import Sequence

from composer3d.replicas import Membership
from composer3d.runner.launching.known_run import KnownRun

__all__ = ["GroupStarts"]


class GroupStarts:
    """Counts of the groups of a run.

    Args:
        num_groups: Of all machines.

    Attributes:
        running: Attempt of each group that was started and has not ended.
        attempts: Number of each group's present start; -1 before the first.
        in_a_row: Starts without a step in between.
        seen: Commits of a group when it was started.
        num_restarts: How often all groups were started again.
    """

    def __init__(self, num_groups: int) -> None:
        self.running: dict[int, int] = {}
        self.attempts = dict.fromkeys(range(num_groups), -1)
        self.in_a_row = dict.fromkeys(range(num_groups), 0)
        self.seen = dict.fromkeys(range(num_groups), 0)
        self.num_restarts = 0

    @property
    def total(self) -> int:
        """Number of starts beside the first of each group."""
        return sum(max(0, attempt) for attempt in self.attempts.values())

    def known(self, membership: Membership, nodes: Sequence[int]) -> KnownRun:
        """Return what a machine that takes over has to know.

        Args:
            membership: Of the run.
            nodes: Numbers of the machines that are there.
        """
        return KnownRun(
            attempts=dict(self.attempts),
            in_a_row=dict(self.in_a_row),
            seen=dict(self.seen),
            committed_by=dict(membership.committed_by),
            num_committed=membership.num_committed,
            num_restarts=self.num_restarts,
            has_begun=membership.has_begun,
            left=membership.left,
            nodes=tuple(nodes),
        )

    def restore(self, known: KnownRun, membership: Membership) -> None:
        """Take over what a lost machine knew, but for what runs.

        Args:
            known: As it was told last.
            membership: Of this machine, which has begun nothing.
        """
        self.attempts |= known.attempts
        self.in_a_row |= known.in_a_row
        self.seen |= known.seen
        self.num_restarts = known.num_restarts
        membership.num_committed, membership.committed_by = known.num_committed, dict(known.committed_by)
