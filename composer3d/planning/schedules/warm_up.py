"""Number of micro-batches that a traced schedule of a pipeline holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WarmUp"]


@dataclass(kw_only=True, eq=False)
class WarmUp:
    """Stash by which a plan traces fewer micro-batches in flight than a schedule has: `context.stash(WarmUp)`.

    Attributes:
        can_be_shorter: A plugin sets it whose schedule of one stage a rank can begin its backwards earlier, and runs
            fewer micro-batches then than the schedule needs.
        most_in_flight: A plan sets it while it traces: micro-batches that the rank holds at most; None: as the schedule
            says.
    """

    can_be_shorter: bool = False
    most_in_flight: int | None = None
