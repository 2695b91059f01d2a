"""Knowledge of the machine that serves a run, as it sends it to those that may have to take over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["KnownRun"]


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """Counts that decide on starts and on the end of a run; the rest is stated by groups and machines.

    Args:
        attempts: Number of each group's present start; -1 before the first.
        in_a_row: Starts of each group without a step in between.
        seen: Steps that each group had made when it was started.
        committed_by: Steps at whose commit each group last took part.
        num_committed: Committed steps.
        num_restarts: How often all groups were started again.
        has_begun: Whether a step was begun.
        left: Groups of the present step.
        nodes: Numbers of the machines that are there, with the one that serves.
    """

    attempts: Mapping[int, int] = field(default_factory=dict)
    in_a_row: Mapping[int, int] = field(default_factory=dict)
    seen: Mapping[int, int] = field(default_factory=dict)
    committed_by: Mapping[int, int] = field(default_factory=dict)
    num_committed: int = 0
    num_restarts: int = 0
    has_begun: bool = False
    left: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> KnownRun:
        """Return what `to_json` has made.

        Raises:
            KeyError: A key is missing.
            TypeError: A value is something else, as for ValueError.
        """
        counts = {name: _counts(content[name]) for name in ("attempts", "in_a_row", "seen", "committed_by")}
        return cls(
            **counts,
            num_committed=int(content["num_committed"]),
            num_restarts=int(content["num_restarts"]),
            has_begun=bool(content["has_begun"]),
            left=tuple(int(group) for group in content["left"]),
            nodes=tuple(int(node) for node in content["nodes"]),
        )


def _counts(content: Any) -> dict[int, int]:
    if not isinstance(content, dict):
        raise TypeError("counts of groups")
    return {int(group): int(count) for group, count in content.items()}
