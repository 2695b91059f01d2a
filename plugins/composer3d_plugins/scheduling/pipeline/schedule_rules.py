"""Schedule rules: the requirements of each schedule and the placement of its stages; numbers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["RULES", "NamedSchedule", "Rule", "ScheduleName", "order_of_one_stage", "too_few"]

ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A schedule's shape.

    Args:
        placement: `one` stage a rank; `loop`: rank r has the stages r, r + P, ...; `v`: r and 2 P - 1 - r.
        splits_backward: Whether it computes the gradients of inputs and of weights separately, so that parameters must
            stay unsharded.
    """

    placement: Literal["one", "loop", "v"]
    splits_backward: bool = False


RULES: dict[str, Rule] = {
    "GPipe": Rule(placement="one"),
    "1F1B": Rule(placement="one"),
    "Interleaved1F1B": Rule(placement="loop"),
    "LoopedBFS": Rule(placement="loop"),
    "InterleavedZeroBubble": Rule(placement="loop", splits_backward=True),
    "ZBVZeroBubble": Rule(placement="v", splits_backward=True),
    "DualPipeV": Rule(placement="v", splits_backward=True),
}


@dataclass(frozen=True, kw_only=True)
class NamedSchedule:
    """One of torch's schedules, for a number of ranks.

    Args:
        name: torch's, such as `1F1B`.
        degree: Ranks along pp.
        per_rank: Stages a rank.
    """

    name: str
    degree: int
    per_rank: int

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed separately."""
        return RULES[self.name].splits_backward

    @property
    def has_one_stage(self) -> bool:
        """Whether a rank has one stage, and torch's class takes it alone."""
        return RULES[self.name].placement == "one"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one rank along pp, in the order of the model."""
        if RULES[self.name].placement == "v":
            return (rank, 2 * self.degree - 1 - rank)
        return tuple(rank + index * self.degree for index in range(self.per_rank))

    def refusal(self, num_microbatches: int) -> str | None:
        """Return why it cannot run so many micro-batches; None where it can."""
        return too_few(
            self.name,
            degree=self.degree,
            num_stages=self.degree * self.per_rank,
            num_microbatches=num_microbatches,
        )


def too_few(schedule: str, *, degree: int, num_stages: int, num_microbatches: int) -> str | None:
    """Return why a schedule cannot run so many micro-batches; None where it can."""
    if schedule == "1F1B" and num_microbatches < degree:
        return f"needs at least as many micro-batches as stages, {degree}"
    if schedule == "DualPipeV" and num_microbatches < num_stages:
        return f"needs at least as many micro-batches as stages, {num_stages} (two a rank)"
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, num_microbatches // degree)
        if num_microbatches % rounds:
            return f"runs them in {rounds} rounds of at least pp = {degree}, and needs a multiple of {rounds}"
    return None


def order_of_one_stage(schedule: str, rank: int, *, degree: int, num_microbatches: int) -> list[tuple[str, int]]:
    """Return the actions of one rank under GPipe or 1F1B, as ("F" or "B", micro-batch).

    torch's own listing of 1F1B is off by one on the last rank; this is the order in which it runs them.
    """
    if schedule == "GPipe":
        return [(kind, index) for kind in "FB" for index in range(num_microbatches)]
    warmup = min(num_microbatches, degree - rank)
    order = [("F", index) for index in range(warmup)]
    for index in range(num_microbatches):
        order.append(("B", index))
        if warmup + index < num_microbatches:
            order.append(("F", warmup + index))
    return order
