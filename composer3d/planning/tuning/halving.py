"""Successive halving: all candidates are measured briefly, the better half of them longer, and so on.

Source: Kevin Jamieson and Ameet Talwalkar, Non-stochastic Best Arm Identification, arXiv:1502.07943.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["halve", "rank_correlation"]


def halve(
    candidates: Sequence[int], measure: Callable[[int, int], float | None], *, num_steps: int
) -> dict[int, list[float]]:
    """Measure candidates in rounds, each of which keeps the faster half, for twice as many steps.

    Args:
        candidates: By number, the most promising first.
        measure: Returns the seconds of a candidate's step over so many steps; None where it failed.
        num_steps: Of the first round.

    Returns:
        Every candidate's figures, one a round that it took part in; none where it failed in its first.
    """
    found: dict[int, list[float]] = {candidate: [] for candidate in candidates}
    left = list(candidates)
    while left:
        measured = {candidate: measure(candidate, num_steps) for candidate in left}
        for candidate, seconds in measured.items():
            if seconds is not None:
                found[candidate].append(seconds)
        ordered = sorted(
            ((seconds, candidate) for candidate, seconds in measured.items() if seconds is not None),
        )
        if len(left) == 1:
            return found
        left = [candidate for _, candidate in ordered[: math.ceil(len(left) / 2)]]
        num_steps *= 2
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Kendall's tau of two orders of the same things: 1 where they agree, -1 where they are opposite.

    Args:
        one: A figure of each.
        other: Another figure of each.

    Returns:
        None for fewer than two things, or where all figures are equal.
    """
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    signs = [_sign(one[i] - one[j]) * _sign(other[i] - other[j]) for i, j in pairs]
    decided = sum(sign != 0 for sign in signs)
    return sum(signs) / decided if decided else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
