"""Rules for differences in the run's own dtypes alone, where everything is right in float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from composer3d.verification.causes.cause_wording import some
from composer3d.verification.comparison import told_apart
from composer3d.verification.evidence.deviations import Deviation
from composer3d.verification.evidence.gains import ALL, Gain
from composer3d.verification.verdict import Evidence, Kind

__all__ = ["multiplied", "roundings"]

# Of a composition beside one device in the same dtypes: how many times as large as what no factor explains it must be,
# and how many units of the dtype. Over 62 cells of the matrix it was 0.1 times for all gradients, 0.4 for one.
_APART, _APART_ALONE = 0.5, 2.0
_UNITS, _UNITS_ALONE = 1.0, 2.0
_FINE = 1e-4  # in dtypes in which this is much, gradients are compared more tightly one by one
# Of one device's own dtypes beside its float64, where errors are those of the dtypes: it was 0.3 times for all, 0.8 for
# one.
_ROUNDED, _ROUNDED_ALONE, _LEAST = 1.0, 4.0, 0.01


def multiplied(evidence: Evidence) -> Iterator[str]:
    """Yield gradients that are scaled in the run's dtypes, where everything is right in float64."""
    if evidence.first_wrong() is not None:
        return
    gains = evidence.reference.gains
    factors = {fqn: gain.factor for fqn, gain in gains.items() if _is_multiplied_alone(fqn, gain)}
    if factors:
        yield _said(factors, "of one device with its precision plugins", "it has in float64")
    found: dict[str, float] = {}
    for report in evidence.ranks:
        beside = report.steps["own"].steps[0].gains if "own" in report.steps else {}
        for fqn, gain in beside.items():
            units, apart = (_UNITS, _APART) if fqn == ALL else (_UNITS_ALONE, _APART_ALONE)
            usual = gains[fqn].off if fqn in gains else 0.0
            if gain.is_multiple and gain.off > max(units * evidence.reference.unit, _FINE, usual, apart * gain.rest):
                found.setdefault(fqn, gain.factor)
    if found:
        yield _said(found, "of the ranks", "one device has")


def _is_multiplied_alone(fqn: str, gain: Gain) -> bool:
    apart = _ROUNDED if fqn == ALL else _ROUNDED_ALONE
    return gain.is_multiple and gain.off > max(_LEAST, apart * gain.rest)


def _said(factors: Mapping[str, float], whose: str, beside: str) -> str:
    if ALL in factors:
        return f"all gradients {whose} are {told_apart(factors[ALL])} times what {beside} (in the run's dtypes)"
    fqn = min(factors)
    return (
        f"{len(factors)} gradients {whose} are multiples of what {beside}, as that of {fqn}, "
        f"{told_apart(factors[fqn])} times (in the run's dtypes)"
    )


# Relative to the largest element; the coarsest dtype, float8 with two digits, rounds by an eighth.
_MORE_THAN_ROUNDED = 0.25


def roundings(evidence: Evidence) -> Iterator[str]:
    """Yield the cause of differences in the run's own dtypes, where nothing is wrong in float64."""
    if "own" not in evidence.reference.tolerances or evidence.first_wrong() is not None or evidence.is_loss_wrong():
        return
    if any(multiplied(evidence)):
        yield (
            "in float64, without the plugins of precision, everything is right, and roundings add errors and do not "
            "multiply: one of those plugins scales gradients, in what it converts, or before the optimizer steps"
        )
        return
    kinds: tuple[tuple[Kind, str], ...] = (("gradients", "the gradients of"), ("parameters", "the updates of"))
    for kind, what in kinds:
        wrong = evidence.wrong(kind, "own")
        if wrong:
            yield f"in float64 everything is right, and in the run's dtypes {what} {_how_rounded(wrong)}"
            return


def _how_rounded(wrong: Mapping[str, Sequence[Deviation]]) -> str:
    if _median(wrong) > _MORE_THAN_ROUNDED:
        return (
            f"{some(sorted(wrong))} are other ones, by more than any dtype rounds: a plugin of precision does "
            "something else on one device, or before gradients are reduced what is to be done after"
        )
    return (
        f"{some(sorted(wrong))} are rounded more than on one device{_as_much_as(wrong)}: a cast, a dtype of reduction, "
        "or a plugin of precision, where one device has none"
    )


def _median(wrong: Mapping[str, Sequence[Deviation]]) -> float:
    return statistics.median(max(deviation.rel for deviation in found) for found in wrong.values())


def _as_much_as(wrong: Mapping[str, Sequence[Deviation]]) -> str:
    """Return a clause naming the dtype whose rounding is about as large as these deviations; empty where none is."""
    off = _median(wrong)
    if not 0.0 < off < math.inf:
        return ""
    # What is rounded once is off by at most half a unit.
    units = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8": 2.0**-4}
    nearest = min(units, key=lambda name: abs(math.log2(off / units[name])))
    return f", about as much as {nearest} rounds" if abs(math.log2(off / units[nearest])) <= 2.0 else ""
