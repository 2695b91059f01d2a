"""Gradients that are scaled in the run's dtypes, on one device or on the ranks, where float64 is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from composer3d.verification.evidence.gains import ALL, Gain
from composer3d.verification.verdict import Evidence

__all__ = ["multiplied"]

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
