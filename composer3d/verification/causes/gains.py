"""Gains: factors by which gradients are scaled. Rounding adds errors of either sign, and keeps a tensor's size.

So a factor of 1.02 is detected among rounding errors of 3 %, and by nothing else: a precision plugin runs in the run's
own dtypes alone, has no comparison in float64, and runs on one device too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.verification.verdict import Evidence

__all__ = ["Gain", "gains_of", "multiplied"]

ALL = ""  # the name of all gradients together
# Elements of a gradient, of which not all are rounded in one direction by chance.
_MANY = 64
# What no factor explains was at most 0.3 of the whole in the dtypes' own errors, with weights of four bits; a plugin
# that leaves more than that, as one that clamps does, does something else than to multiply.
_ALIKE = 0.3
# Of a composition beside one device in the same dtypes: how many times as large as what no factor explains it must be,
# and how many units of the dtype. Over 62 cells of the matrix it was 0.1 times for all gradients, 0.4 for one.
_APART, _APART_ALONE = 0.5, 2.0
_UNITS, _UNITS_ALONE = 1.0, 2.0
_FINE = 1e-4  # in dtypes in which this is much, gradients are compared more tightly one by one
# Of one device's own dtypes beside its float64, where errors are those of the dtypes: it was 0.3 times for all, 0.8 for
# one.
_ROUNDED, _ROUNDED_ALONE, _LEAST = 1.0, 4.0, 0.01


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A tensor as a multiple of another.

    Args:
        factor: Least-squares factor.
        rest: Norm of the residual, relative to that of the other.
    """

    factor: float
    rest: float

    @property
    def off(self) -> float:
        """Distance of the factor from 1."""
        return abs(self.factor - 1.0)

    @property
    def is_multiple(self) -> bool:
        """Whether the residual is no larger than rounding's."""
        return self.rest <= _ALIKE * self.factor


def gains_of(
    actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, skip_zeros: bool = False
) -> dict[str, Gain]:
    """Return the gain of all gradients together, and of each with many elements; none where all are zero.

    Args:
        actual: By FQN.
        reference: By FQN.
        skip_zeros: Leave out elements that are zero: in float16 small ones are.
    """
    sums: dict[str, tuple[float, float, float]] = {}
    both, right, squared = 0.0, 0.0, 0.0
    for fqn, tensor in reference.items():
        if fqn not in actual or actual[fqn].shape != tensor.shape:
            continue
        one, other = actual[fqn].double().flatten().cpu(), tensor.double().flatten().cpu()
        if skip_zeros:
            one, other = one[one != 0.0], other[one != 0.0]
        here = float(one @ other), float(other @ other), float(one @ one)
        both, right, squared = both + here[0], right + here[1], squared + here[2]
        if one.numel() >= _MANY:
            sums[fqn] = here
    sums[ALL] = both, right, squared
    return {fqn: _gain(*found) for fqn, found in sums.items() if found[1] > 0.0}


def _gain(both: float, right: float, squared: float) -> Gain:
    factor = both / right
    return Gain(factor=factor, rest=math.sqrt(max(squared / right - factor * factor, 0.0)))


def multiplied(evidence: Evidence) -> Iterator[str]:
    """Yield gradients that are scaled in the run's dtypes, where everything is right in float64."""
    if evidence.first_wrong() is not None:
        return
    gains = evidence.told.gains
    factors = {fqn: gain.factor for fqn, gain in gains.items() if _is_multiplied_alone(fqn, gain)}
    if factors:
        yield _said(factors, "of one device with its precision plugins", "it has in float64")
    found: dict[str, float] = {}
    for report in evidence.ranks:
        beside = report.steps["own"].steps[0].gains if "own" in report.steps else {}
        for fqn, gain in beside.items():
            units, apart = (_UNITS, _APART) if fqn == ALL else (_UNITS_ALONE, _APART_ALONE)
            usual = gains[fqn].off if fqn in gains else 0.0
            if gain.is_multiple and gain.off > max(units * evidence.told.unit, _FINE, usual, apart * gain.rest):
                found.setdefault(fqn, gain.factor)
    if found:
        yield _said(found, "of the ranks", "one device has")


def _is_multiplied_alone(fqn: str, gain: Gain) -> bool:
    apart = _ROUNDED if fqn == ALL else _ROUNDED_ALONE
    return gain.is_multiple and gain.off > max(_LEAST, apart * gain.rest)


def _said(factors: Mapping[str, float], whose: str, beside: str) -> str:
    if ALL in factors:
        return f"all gradients {whose} are {factors[ALL]:.4g} times what {beside} (in the run's dtypes)"
    fqn = min(factors)
    return (
        f"{len(factors)} gradients {whose} are multiples of what {beside}, as that of {fqn}, {factors[fqn]:.4g} times "
        "(in the run's dtypes)"
    )
