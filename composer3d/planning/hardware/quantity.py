"""Numbers with their unit, as hardware files write them: `80 GiB`, `300 GB/s`, `312 TFLOP/s`, `5 us`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

__all__ = ["BANDWIDTH", "COMPUTE", "POWER", "SIZE", "TIME", "parse", "show"]

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGT", 1)}

SIZE: Mapping[str, float] = {f"{prefix}B": factor for prefix, factor in (_PREFIXES | _BINARY).items()}
BANDWIDTH: Mapping[str, float] = {
    **{f"{prefix}B/s": factor for prefix, factor in _PREFIXES.items()},
    **{f"{prefix}b/s": factor / 8 for prefix, factor in _PREFIXES.items()},
}
COMPUTE: Mapping[str, float] = {f"{prefix}FLOP/s": factor for prefix, factor in _PREFIXES.items()}
TIME: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
POWER: Mapping[str, float] = {"W": 1.0, "kW": 1e3}

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?) ?([A-Za-z/]+)")


def parse(text: object, units: Mapping[str, float]) -> float:
    """Read a number with its unit and return it in the base unit: bytes, operations or bytes a second, seconds, watts.

    >>> parse("400 Gb/s", BANDWIDTH), parse("80 GiB", SIZE)
    (50000000000.0, 85899345920.0)

    Args:
        text: A number and a unit.
        units: The units that are allowed, with their size in the base unit.

    Raises:
        ValueError: It has no unit, or one of another kind, or is larger than a float holds.
    """
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not a number with one of the units {', '.join(units)}")
    found = float(match[1]) * units[match[2]]
    if not math.isfinite(found):
        raise ValueError(f"{text!r} is larger than any machine's")
    return found


def show(value: float, units: Mapping[str, float]) -> str:
    """Write a number with the unit in which it reads best, so that `parse` gives it back to six digits."""
    fitting = [(size, unit) for unit, size in units.items() if "i" not in unit and "b/s" not in unit and value >= size]
    size, unit = max(fitting) if fitting else min((size, unit) for unit, size in units.items() if "b/s" not in unit)
    return f"{value / size:.6g} {unit}"
