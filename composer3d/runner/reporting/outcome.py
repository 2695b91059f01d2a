"""End of a run on a rank: its status, steps and last loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Outcome"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Ending of a run on this rank.

    Args:
        status: `preempted` saved and stopped because a signal asked for it; `already finished` had nothing to do.
        step: Optimizer steps done, over all starts of the run.
        loss: Of the last step, None where this start made none.
        output: The run's folder.
    """

    status: Literal["finished", "preempted", "already finished"]
    step: int
    loss: float | None
    output: str
