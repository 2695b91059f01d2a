"""Divisor of the mean over a global batch, from what its parts' sums were divided by and what those sums count.

A loop divides its sum by `mask.sum().clamp(min=1)`, by `n + 1e-8` or by the number of its samples. One device divides
the sum over all parts once, so a bound that a part without targets meets, and a constant that is added, count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from composer3d.errors import LossError
from composer3d.step.losses.loss_factors import uncounted
from composer3d.step.losses.loss_graph import unknown_mean

__all__ = ["NUM_COUNTS", "Part", "added_constants", "counts_of", "slots_of", "total_divisor"]

NUM_COUNTS = 4  # that ranks exchange

_ROUNDING = 1e-6  # of a count and a constant that are added in float32
_CONSTANT = 1e-3  # what is added to counts against a division by zero is less
_NO_COUNT = 1e-6  # a bound that weighs nothing beside a count of 1
_WHAT_TO_WRITE = (
    "give backward the sum and its count, or return both from loss_fn, and no clamp is needed: "
    "run.backward(((loss * mask).sum(), mask.sum()))"
)
_UNSEEN = (
    "a part of the global batch has the loss 0, divided by {divisor:g}, and its graph does not show whether it has "
    "that many targets or none and a divisor that is clamped; " + _WHAT_TO_WRITE
)
_EITHER = (
    "the sums of the loss are divided by {divisor:g} everywhere, and add up {least:g} to {most:g} targets: whether "
    "that is their number, as clamp or a constant beside it leaves it, or a number of samples cannot be told; "
    + _WHAT_TO_WRITE
)
_BESIDE = (
    "the loss adds a constant or a term of parameters to a sum whose divisor is bounded, or has a constant of its own: "
    "the divisors of all parts add up to {added:g}, and one device's is {total:g}, so that what is added would weigh "
    "more than there; " + _WHAT_TO_WRITE
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A sum of a rank's micro-batch, which was divided.

    Args:
        divisor: Divisor of the loss.
        count: Targets that it adds up, None where its graph does not say.
        is_zero: Whether the loss is 0.
        numel: Elements that it adds up, padding included.
        is_counted: Whether the divisor is a number of samples, elements or targets that its graph shows, or is stated
            to be one.
        counts: Numbers that its graph shows, any of which may be that of its targets, in the order of the graph.
        constant: What the loss adds to the mean; None where that is not seen, or made of parameters.
    """

    divisor: float
    count: float | None
    is_zero: bool = False
    numel: int = 0
    is_counted: bool = True
    counts: tuple[float, ...] = ()
    constant: float | None = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether the divisor is the count, to the rounding of float32 or better."""
        return self.count is not None and math.isclose(self.divisor, self.count, rel_tol=1e-12)


def slots_of(counts: Sequence[float]) -> list[float]:
    """Return the first counts of a part as four numbers, NaN where there are fewer."""
    return [*counts[:NUM_COUNTS], *[math.nan] * (NUM_COUNTS - len(counts))]


def counts_of(slots: Sequence[float]) -> tuple[float, ...]:
    """Return the counts in these numbers."""
    return tuple(each for each in slots if not math.isnan(each))


def total_divisor(parts: Sequence[Part], unknown: Callable[[str], LossError] = unknown_mean) -> float:
    """Return the divisor that one device applies to the sum of all parts.

    Args:
        parts: Of all ranks and micro-batches that make one mean.
        unknown: Makes the error of a divisor that may be a constant.

    Raises:
        LossError: Two readings give different means.
    """
    added = sum(part.divisor for part in parts)
    parts = _with_one_count(parts)
    _refuse_constants(parts, unknown)
    if all(part.is_exact for part in parts) or all(part.is_zero for part in parts) or len(parts) == 1:
        return added
    if any(part.count is None for part in parts):
        return _unseen(parts, added)
    constant = min(_excess(part) for part in parts)
    if 0 < constant < _CONSTANT:
        without = [_changed(part, part.divisor - constant) for part in parts]
        return total_divisor(without, unknown) + constant
    return _seen(parts, added)


def added_constants(parts: Sequence[Part], total: float) -> float:
    """Return what the sums of parts lack so that, divided by the divisor of all, constants are what they are in each.

    Args:
        parts: Of all ranks and micro-batches that make one mean.
        total: Divisor of the mean.

    Raises:
        LossError: A constant is not seen, and the divisors of the parts do not add up to that of the mean.
    """
    added = sum(part.divisor for part in parts)
    if math.isclose(total, added, rel_tol=1e-12) or all(part.constant == 0.0 for part in parts):
        return 0.0
    if any(part.constant is None for part in parts):
        if math.isclose(total, added, rel_tol=_ROUNDING):
            return 0.0
        raise LossError(_BESIDE.format(added=added, total=total))
    constants = sum((part.constant or 0.0) * part.divisor for part in parts)
    return constants * (total / added - 1.0)


def _refuse_constants(parts: Sequence[Part], unknown: Callable[[str], LossError]) -> None:
    """Refuse one divisor of all parts that counts nothing seen, which is no more a count than a constant."""
    if len(parts) > 1 and all(part.divisor == parts[0].divisor and not part.is_counted for part in parts):
        raise unknown(uncounted(parts[0].divisor, "divides"))


def _with_one_count(parts: Sequence[Part]) -> Sequence[Part]:
    """Return parts with the count that leaves one constant of all divisors, as of `w.sum() + 1`, where one does.

    The nearest one of each part may be the number of its weights on one rank and their sum on another.
    """
    num = min((len(part.counts) for part in parts), default=0)
    if all(part.numel == part.divisor for part in parts):
        return parts
    constants: list[float] = []
    for counts in zip(*(part.counts[:num] for part in parts), strict=True):
        excesses = [part.divisor - count for part, count in zip(parts, counts, strict=True)]
        if max(map(abs, excesses)) < _CONSTANT:
            return parts  # which are told apart by the nearest
        is_one = max(excesses) - min(excesses) <= _ROUNDING * max(part.divisor for part in parts)
        # Where all are alike, a constant of 1 is told from a count by nobody, and refused.
        if is_one and min(excesses) > 0 and (len({*counts}) > 1 or {*excesses} == {1.0}):
            constants.append(sum(excesses) / len(excesses))
    return [replace(part, count=part.divisor - min(constants)) for part in parts] if constants else parts


def _excess(part: Part) -> float:
    return part.divisor - (part.count or 0.0)


def _changed(part: Part, divisor: float) -> Part:
    count = part.count
    if count is not None and math.isclose(divisor, count, rel_tol=1e-9, abs_tol=1e-12):
        divisor = count  # the constant was rounded when it was added
    return replace(part, divisor=divisor)


def _unseen(parts: Sequence[Part], added: float) -> float:
    for part in parts:
        if part.count is None and part.is_zero and _NO_COUNT < part.divisor <= 1:
            raise LossError(_UNSEEN.format(divisor=part.divisor))
    return added


def _seen(parts: Sequence[Part], added: float) -> float:
    counts = [part.count or 0.0 for part in parts]
    exact = [part.divisor for part in parts if part.is_exact]
    above = [part for part in parts if not part.is_exact]
    if any(_excess(part) < 0 for part in above):
        return added  # the divisor is no number of targets
    if not exact:
        excesses = {round(_excess(part), 9) for part in above}
        if len(excesses) > 1:
            return added
        if len(set(counts)) == 1 and excesses == {1.0}:
            raise LossError(_EITHER.format(divisor=above[0].divisor, least=counts[0], most=counts[0]))
        return added if len(set(counts)) == 1 else sum(counts) + excesses.pop()
    bounds = {part.divisor for part in above}
    bound = max(bounds)
    if len(bounds) > 1 or min(exact) < bound or (bound > 1 and max(exact) == bound):
        return added
    if max(exact) == bound and all(part.numel <= 1 for part in parts):
        raise LossError(_EITHER.format(divisor=bound, least=min(counts), most=max(counts)))
    return max(sum(counts), bound)
