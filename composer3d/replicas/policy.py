"""Rules by which groups of ranks are kept together; the answer to `composer3d_replicas`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ReplicaPolicy"]


@dataclass(frozen=True, kw_only=True)
class ReplicaPolicy:
    """How groups of ranks that train one model are kept together while some of them come and go.

    Args:
        minimum: Groups without which no step is made: those that are left wait for others.
        spares: Groups that are ready and take no part until another one is lost.
        silent_s: Seconds after which a group is lost of whose ranks one is not heard of, as one that was stopped.
        late_s: Seconds that the others wait for a group that is heard of and does not come to a step.
        join_s: Seconds in which groups are to come, at the beginning and where fewer than `minimum` are left.
        restarts: How often a group that is lost is started again without having taken part in a step in between.
    """

    minimum: int = 1
    spares: int = 0
    silent_s: float = 15.0
    late_s: float = 600.0
    join_s: float = 600.0
    restarts: int = 3

    def to_json(self) -> Mapping[str, Any]:
        """Return the policy as JSON values."""
        return asdict(self)
