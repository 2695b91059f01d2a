"""Successive halving: all candidates are measured briefly, the better half of them longer, and so on.

Source: Kevin Jamieson and Ameet Talwalkar, Non-stochastic Best Arm Identification, arXiv:1502.07943. A machine's speed
changes while candidates are measured one after the other: who is nearly as fast as the fastest stays, and the last are
measured in turns, and compared turn by turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

__all__ = ["halve", "paired", "rank_correlation"]

NEAR = 0.1  # by which a candidate may be slower than the fastest, and stay


def halve(
    candidates: Sequence[int],
    measure: Callable[[int, int], float | None],
    measure_in_turns: Callable[[Sequence[int], int], Mapping[int, Sequence[float]]],
    *,
    num_steps: int,
) -> dict[int, list[float]]:
    """Measure candidates in rounds, each of which keeps the faster half, for twice as many steps.

    Who is within a tenth of the fastest is kept, too. The last round is of two, or of those of which the round before
    left out none: they are measured in turns.

    Args:
        candidates: By number, the most promising first.
        measure: Returns the seconds of a candidate's step over so many steps; None where it failed.
        measure_in_turns: The same of several candidates: seconds of each by turn, without those that failed.
        num_steps: Of the first round.

    Returns:
        Every candidate's figures, one a round that it took part in; none where it failed in its first.
    """
    found: dict[int, list[float]] = {candidate: [] for candidate in candidates}
    left, is_last = list(candidates), len(candidates) <= 2
    while left:
        if is_last and len(left) > 1:
            measured = paired(measure_in_turns(left, num_steps))
        else:
            figures = {candidate: measure(candidate, num_steps) for candidate in left}
            measured = {candidate: seconds for candidate, seconds in figures.items() if seconds is not None}
        for candidate, seconds in measured.items():
            found[candidate].append(seconds)
        if is_last:
            return found
        ordered = sorted(measured, key=lambda candidate: measured[candidate])
        half, near_s = math.ceil(len(left) / 2), (1 + NEAR) * min(measured.values(), default=0.0)
        kept = [c for place, c in enumerate(ordered) if place < half or measured[c] <= near_s]
        is_last = len(kept) <= 2 or len(kept) == len(left)
        left = kept
        num_steps *= 2
    return found


def paired(turns: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return each candidate's figure from those of its turns.

    A turn's figures are taken relative to their mean, so that what a machine does faster or slower from turn to turn is
    in none; of each candidate's the median counts, times the median turn.

    Args:
        turns: Seconds by turn, as many of every candidate.
    """
    means = [math.exp(statistics.fmean(map(math.log, turn))) for turn in zip(*turns.values(), strict=True)]
    return {
        candidate: statistics.median(means)
        * statistics.median(seconds / mean for seconds, mean in zip(figures, means, strict=True))
        for candidate, figures in turns.items()
    }


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
