"""Types of the numbers in hardware files: each with its unit there, and in the base unit in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Strict, ValidationInfo

from composer3d.planning.hardware.quantity import BANDWIDTH, COMPUTE, POWER, SIZE, TIME, parse

__all__ = [
    "CONFIG",
    "Bandwidth",
    "Count",
    "Memory",
    "Part",
    "Reserve",
    "Seconds",
    "Size",
    "Speed",
    "Watts",
    "Whole",
    "WholeSize",
    "quantity",
    "rule",
]

CONFIG = ConfigDict(extra="forbid", populate_by_name=True, allow_inf_nan=False)


def quantity(units: Mapping[str, float], *, is_positive: bool = False) -> BeforeValidator:
    """Return the rule of a number that has a unit in files, and is in the base unit in Python."""

    def read(value: object, info: ValidationInfo) -> object:
        found = parse(value, units) if info.context or isinstance(value, str) else value
        if is_positive and isinstance(found, int | float) and found <= 0:
            raise ValueError(f"{value!r}; it is above 0")
        return found

    return BeforeValidator(read)


def rule(holds: Callable[[Any], bool], text: str) -> BeforeValidator:
    """Return a rule that says what a number must be."""

    def check(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
            raise ValueError(f"{value!r}; {text}")
        return value

    return BeforeValidator(check)


Size = Annotated[float, quantity(SIZE)]
WholeSize = Annotated[int, BeforeValidator(int), quantity(SIZE)]
Memory = Annotated[int, BeforeValidator(int), quantity(SIZE, is_positive=True)]
Bandwidth = Annotated[float, quantity(BANDWIDTH, is_positive=True)]
Speed = Annotated[float, quantity(COMPUTE, is_positive=True)]
Seconds = Annotated[float, quantity(TIME)]
Watts = Annotated[float, quantity(POWER)]
Part = Annotated[float, rule(lambda part: 0 < part <= 1, "it is a part of the whole, above 0 and at most 1")]
Reserve = Annotated[float, rule(lambda factor: 1 <= factor < 2, "reserved over allocated bytes, 1 to 2")]
Whole = Annotated[int, Strict()]
Count = Annotated[int, Strict(), rule(lambda number: number >= 1, "it is at least 1")]
