"""Layout constraints of `suggest`: `--keep tp=8`, `--keep "tp<=8"`, `--keep recompute=full`, `--keep zero`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from composer3d.errors import ArgumentError, did_you_mean
from composer3d.planning.formulas.layout_numbers import Setup

__all__ = ["KEYS", "kept"]

KEYS: Mapping[str, Callable[[Setup], object]] = {
    "dp_replicate": lambda setup: setup.dp_replicate,
    "dp_shard": lambda setup: setup.dp_shard,
    "cp": lambda setup: setup.cp,
    "ep": lambda setup: setup.ep,
    "tp": lambda setup: setup.tp,
    "pp": lambda setup: setup.pp,
    "microbatch": lambda setup: setup.microbatch,
    "zero": lambda setup: setup.zero,
    "schedule": lambda setup: setup.schedule if setup.pp > 1 else "none",
    "stages_per_rank": lambda setup: setup.stages_per_rank,
    "recompute": lambda setup: setup.recompute,
    "offload": lambda setup: str(setup.offload).lower(),
    "precision": lambda setup: setup.precision.dtype,
    "compression": lambda setup: setup.compression,
}
_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # which multiply to the world's ranks
_ORDERS: Mapping[str, Callable[[int, int], bool]] = {"<=": operator.le, ">=": operator.ge}
_PIN = re.compile(r"([a-z_]+) *(?:(=|<=|>=) *([A-Za-z0-9_]+))?")


def kept(
    pins: Sequence[str],
    own: Setup,
    words: Mapping[str, Sequence[str]] | None = None,
    *,
    world_size: int | None = None,
) -> Callable[[Setup], bool]:
    """Return whether a layout keeps what is pinned.

    Args:
        pins: As on the command line; a bare key keeps what the manifest says.
        own: The manifest in numbers.
        words: Values by key, of those whose values are words, that a search chooses from beside the manifest's own.
        world_size: Ranks of all layouts; None where they differ.

    Raises:
        ArgumentError: A key is not known, or cannot be compared so; or no layout has such a value.
    """
    conditions = [_condition(pin, own, words or {}) for pin in pins]
    if world_size is not None:
        _refuse_degrees(pins, world_size)
    return lambda setup: all(condition(setup) for condition in conditions)


def _refuse_degrees(pins: Sequence[str], world_size: int) -> None:
    """Refuse degrees that no layout of a world has, whatever its model: they do not divide its ranks."""
    stated = [match for match in map(_PIN.fullmatch, map(str.strip, pins)) if match is not None]
    degrees = {match[1]: int(match[3]) for match in stated if match[1] in _DEGREES and match[2] == "="}
    if world_size % math.prod(degrees.values()):
        named = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        raise ArgumentError("keep", f"{named} does not divide {world_size} ranks")


def _condition(pin: str, own: Setup, words: Mapping[str, Sequence[str]]) -> Callable[[Setup], bool]:
    match = _PIN.fullmatch(pin.strip())
    if match is None:
        raise ArgumentError("keep", f'"{pin}" pins nothing; write for example tp=8, "tp<=8" or recompute')
    key, relation, value = match[1], match[2] or "=", match[3]
    if key not in KEYS:
        raise ArgumentError("keep", f'"{key}" cannot be kept; {did_you_mean(key, sorted(KEYS))}')
    read = KEYS[key]
    if value is not None and isinstance(read(own), int):
        least = 0 if key == "zero" else 1
        if not value.isdigit() or (relation != ">=" and int(value) < least):
            raise ArgumentError("keep", f'"{pin}" holds of no layout: {key} is a whole number of at least {least}')
    if value is not None and relation == "=" and key in words:
        known = sorted({*words[key], str(read(own))})
        if value not in known:
            raise ArgumentError("keep", f'"{pin}" holds of no layout: {key} is {" or ".join(known)}')
    if relation == "=":
        wanted = str(read(own)) if value is None else value
        return lambda setup: str(read(setup)) == wanted
    if not value.isdigit() or not isinstance(read(own), int):
        raise ArgumentError("keep", f'"{pin}" compares what is no number; write {key}={value}')
    compare, bound = _ORDERS[relation], int(value)

    def holds(setup: Setup) -> bool:
        number = read(setup)
        return isinstance(number, int) and compare(number, bound)

    return holds
