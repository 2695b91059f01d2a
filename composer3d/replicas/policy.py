"""Policy for replica groups that may leave and rejoin; the result of `composer3d_replicas`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ReplicaPolicy"]


@dataclass(frozen=True, kw_only=True)
class ReplicaPolicy:
    """Policy for replica groups that may leave and rejoin.

    Args:
        minimum: Minimum number of groups for a step; fewer wait for others to join.
        spares: Number of idle groups, each of which replaces a lost one.
        silent_s: Seconds without a heartbeat of any one rank after which its group is lost; of the last group that has
            the state four times as many, since nobody goes on without it.
        late_s: Seconds that the others wait in a step for a group whose heartbeats arrive.
        join_s: Seconds to wait for groups to join, at the start and while fewer than `minimum` are left.
        replay_every: Steps between two in which each group computes the piece of another one too; None for never.
        restarts: Maximum number of consecutive restarts of a lost group without a step in between.
    """

    minimum: int = 1
    spares: int = 0
    silent_s: float = 15.0
    late_s: float = 600.0
    join_s: float = 600.0
    replay_every: int | None = None
    restarts: int = 3

    @property
    def patience_s(self) -> float:
        """Seconds after which a server among several is silent: it gives up who cannot reach it before these do it."""
        return 1.4 * self.silent_s

    @property
    def candidate_s(self) -> float:
        """Seconds that a machine which may serve has before the next one does: not all notice a silence at once."""
        return 0.4 * self.silent_s + 5.0

    @property
    def gather_s(self) -> float:
        """Seconds that a server which takes over waits for the other machines and their ranks."""
        return 0.4 * self.silent_s + 10.0

    @property
    def takeover_s(self) -> float:
        """Seconds after which nobody is to be expected to take over."""
        return 3 * self.silent_s + 30.0

    def to_json(self) -> Mapping[str, Any]:
        """Return the policy as JSON values."""
        return asdict(self)
