"""Validation of hardware files: every key and unit, and the direction and owner of every bandwidth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer3d.errors import did_you_mean
from composer3d.planning.hardware.quantity import BANDWIDTH, COMPUTE, SIZE, TIME, parse

__all__ = ["problems_of"]

_TOP = {"devices_per_node", "slowdown", "known", "sources", "device", "intra", "inter", "host", "measured"}
_UNITS = {"memory": SIZE, "memory_bandwidth": BANDWIDTH, "launch": TIME, "context": SIZE}
_PARTS = ("memory_efficiency", "attention_efficiency", "attention_backward_efficiency")
# Tables of what was timed: of each key its units, or the type of what has none.
_GEMM = {"dtype": str, "m": int, "n": int, "k": int, "speed": COMPUTE}
_ATTENTION = {"dtype": str, "length": int, "width": int, "forward": COMPUTE, "backward": COMPUTE}
_OPERATOR = {"name": str, "dtype": str, "bytes": SIZE, "time": TIME}
_COLLECTIVE = {"op": str, "ranks": int, "bytes": SIZE, "time": TIME}
_TIMED: Mapping[str, Mapping[str, Any]] = {"gemm": _GEMM, "attention": _ATTENTION, "operator": _OPERATOR}
_OTHERS = {
    "name",
    "peak",
    "gemm_efficiency",
    "num_units",
    "asynchronous",
    "reserve_factor",
    "overhead",
    "fresh_bandwidth",
}
_DEVICE = {*_UNITS, *_PARTS, *_TIMED, *_OTHERS}
_LINK = {"name", "bandwidth", "direction", "per", "efficiency", "latency", "base", "source", "collective"}
_DIRECTIONS = {"each": "in each direction", "both": "in both directions together"}
_OWNERS = {"device": "of one device", "node": "of a whole node, shared by its devices"}


def problems_of(content: Mapping[str, Any]) -> list[str]:
    """Return every mistake of a description, as sentences with the key.

    Args:
        content: The file, with a network's name replaced by its table.
    """
    return list(_problems(content))


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown("", content, _TOP)
    number = content.get("devices_per_node")
    if not isinstance(number, int) or number < 1:
        yield f"devices_per_node = {number!r}; it is a whole number of at least 1"
    if not content.get("sources"):
        yield "sources is missing: a list of texts that say where the figures come from"
    if content.get("known", "assumed") not in ("assumed", "calibrated"):
        yield f'known = {content["known"]!r}; it is "assumed" or "calibrated"'
    if not 1 <= content.get("slowdown", 1.1) <= 3:
        yield f"slowdown = {content['slowdown']}; compute beside a collective takes 1 to 3 times as long"
    if isinstance(content.get("device"), Mapping):
        yield from _device_problems(content["device"])
    else:
        yield "the table [device] is missing"
    for name in ("intra", "inter", "host"):
        table = content.get(name)
        if isinstance(table, Mapping):
            yield from _link_problems(name, table)
        else:
            yield f"the table [{name}] is missing"


def _device_problems(table: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown("device.", table, _DEVICE)
    if "name" not in table:
        yield "device.name is missing"
    for key, units in _UNITS.items():
        yield from _unit(f"device.{key}", table.get(key), units)
    for key in _PARTS:
        yield from _part(f"device.{key}", table.get(key))
    if not 1 <= table.get("reserve_factor", 0) < 2:
        yield f"device.reserve_factor = {table.get('reserve_factor')!r}; reserved over allocated bytes, 1 to 2"
    if "fresh_bandwidth" in table:
        yield from _unit("device.fresh_bandwidth", table["fresh_bandwidth"], BANDWIDTH)
    for name, text in table.get("overhead", {}).items():
        yield from _unit(f"device.overhead.{name}", text, TIME)
    for key, columns in _TIMED.items():
        yield from _timed(f"device.{key}", table.get(key, ()), columns)
    peaks, parts = table.get("peak", {}), table.get("gemm_efficiency", {})
    for dtype, text in peaks.items():
        yield from _unit(f"device.peak.{dtype}", text, COMPUTE)
        if dtype not in parts and "default" not in parts:
            yield f'device.gemm_efficiency says nothing of {dtype}; write "default" for all others'
    if not peaks:
        yield "the table [device.peak] is missing: dense operations a second by dtype"
    for dtype, part in parts.items():
        yield from _part(f"device.gemm_efficiency.{dtype}", part)


def _link_problems(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown(f"{name}.", table, _LINK)
    yield from _unit(f"{name}.bandwidth", table.get("bandwidth"), BANDWIDTH)
    for key, allowed in (("direction", _DIRECTIONS), ("per", _OWNERS)):
        if table.get(key) not in allowed:
            meaning = ", ".join(f'"{word}" ({what})' for word, what in allowed.items())
            told = f"{name}.{key} = {table[key]!r}" if key in table else f"{name}.bandwidth has no {key}"
            yield f"{told}: {table.get('bandwidth')} may be twice or half of it; write {key} = one of {meaning}"
    yield from _part(f"{name}.efficiency", table.get("efficiency"))
    for key in ("latency", "base"):
        yield from _unit(f"{name}.{key}", table.get(key), TIME)
    yield from _timed(f"{name}.collective", table.get("collective", ()), _COLLECTIVE)
    if "name" not in table:
        yield f"{name}.name is missing"


def _timed(key: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with rows of what was timed."""
    for number, row in enumerate(rows):
        yield from _unknown(f"{key}[{number}].", row, set(columns))
        for column, expected in columns.items():
            if isinstance(expected, Mapping):
                yield from _unit(f"{key}[{number}].{column}", row.get(column), expected)
            elif not isinstance(row.get(column), expected):
                kind = "a text" if expected is str else "a whole number"
                yield f"{key}[{number}].{column} = {row.get(column)!r}; it is {kind}"


def _unknown(prefix: str, table: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    for key in table:
        if key not in known:
            yield f'unknown key "{prefix}{key}"; {did_you_mean(key, sorted(known))}'


def _unit(key: str, text: object, units: Mapping[str, float]) -> Iterator[str]:
    if text is None:
        yield f"{key} is missing"
        return
    try:
        parse(text, units)
    except ValueError as error:
        yield f"{key} = {error}"


def _part(key: str, value: object) -> Iterator[str]:
    if not isinstance(value, int | float) or not 0 < value <= 1:
        yield f"{key} = {value!r}; it is a part of the whole, above 0 and at most 1"
