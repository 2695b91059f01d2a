"""Descriptions of types and values in TOML's terms, for messages."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from composer3d.manifest.descriptions import fields
from composer3d.manifest.secret import WANTED, Secret
from composer3d.manifest.toml_writer import inline

__all__ = ["alternatives", "bare", "choices", "count", "describe", "expected", "seconds_in", "shortened"]

_NOUNS = {
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a path", "paths"),
    Secret: (WANTED, "secrets"),
    re.Pattern: ("a regular expression", "regular expressions"),
}
_BOUNDS = {"ge": "of at least", "gt": "greater than", "le": "of at most", "lt": "less than"}
_LISTS = (Sequence, Set, Iterable)


def bare(annotation: Any) -> Any:
    """Return an annotation without `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union, each as it is annotated; None is left out, for TOML has none."""
    plain = bare(annotation)
    if get_origin(plain) in (Union, UnionType):
        return [leaf for member in get_args(plain) for leaf in alternatives(member) if leaf is not NoneType]
    return [annotation]


def choices(annotation: Any) -> list[Any]:
    """Return the values that literals and enums of an annotation allow."""
    found: list[Any] = []
    for member in map(bare, alternatives(annotation)):
        if get_origin(member) is Literal:
            found += get_args(member)
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            found += [value.value for value in member]
    return found


def expected(annotation: Any) -> str:
    """Describe the values that a key accepts, for example `"auto" or an integer of at least 1`.

    Bounds are stated only for unions: a single type that is out of bounds has a message of its own.
    """
    members = alternatives(annotation)
    if len(members) == 1:
        members = [bare(members[0])]
    # Bounded kinds last, or the bound would seem to go on: "an integer of at least 1 or -1".
    members.sort(key=lambda member: bool(_bounds(member)))
    phrases = list(dict.fromkeys(phrase for member in members for phrase in _phrases(member)))
    if "a number" in phrases and "an integer" in phrases:
        phrases.remove("an integer")
    return " or ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)


def describe(value: Any) -> str:
    """Describe the value of a key, for example `the string "x"`; long strings are shortened."""
    if isinstance(value, bool):
        return inline(value)
    if isinstance(value, str):
        return f"the string {inline(value if len(value) <= 60 else value[:57] + '...')}"
    if isinstance(value, int):
        return f"the integer {shortened(value)}"
    if isinstance(value, float):
        return f"the number {inline(value)}"
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, Sequence) else f"the date or time {inline(value)}"


def shortened(value: Any) -> str:
    """Return a value as TOML, shortened where it is long."""
    text = inline(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def count(number: int, noun: str) -> str:
    """Return `1 item` or `2 items`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _phrases(member: Any) -> list[str]:
    if values := choices(member):
        return [inline(value) for value in values]
    plain = bare(member)
    origin = get_origin(plain) or plain
    if origin is str and (pattern := _pattern(member)):
        suffix = re.fullmatch(r"\\(\.\w+)\$", pattern)
        return [f"the path of a {suffix[1]} file" if suffix else f"a string that matches {pattern}"]
    if origin in _NOUNS:
        return [" ".join([_NOUNS[origin][0], *_bounds(member)])]
    if fields(origin) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return ["a table"]
    if isinstance(origin, type) and issubclass(origin, _LISTS):
        return [_list_phrase(origin, get_args(plain))]
    return ["another kind of value"]


def _list_phrase(origin: type, items: tuple[Any, ...]) -> str:
    fixed = origin is tuple and Ellipsis not in items and bool(items)
    kinds = {bare(item) for item in items if item is not Ellipsis}
    plural = _NOUNS[kinds.pop()][1] if len(kinds) == 1 and kinds <= _NOUNS.keys() else "items"
    if fixed:
        return f"a list of {len(items)} {plural}"
    return f"a list of {plural}" if plural != "items" else "a list"


def _constraints(member: Any) -> list[Any]:
    if get_origin(member) is not Annotated:
        return []
    # A pydantic Field holds its constraints in a list of its own.
    return [inner for item in get_args(member)[1:] for inner in getattr(item, "metadata", [item])]


def _pattern(member: Any) -> str | None:
    return next((found for item in _constraints(member) if (found := getattr(item, "pattern", None))), None)


def _bounds(member: Any) -> list[str]:
    found = [(words, getattr(item, name, None)) for item in _constraints(member) for name, words in _BOUNDS.items()]
    return [f"{words} {inline(bound)}" for words, bound in found if bound is not None]


def seconds_in(text: object, key: object) -> str | None:
    """Return what to write in place of a duration with a unit, where a key takes seconds; None where it is none.

    >>> seconds_in("30 min", "timeout_s")
    'write 1800: it is in seconds'
    """
    units = {"ms": 0.001, "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
    units |= {"d": 86400, "day": 86400}
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", str(text).lower())
    scale = None if found is None else units.get(found[2], units.get(found[2].removesuffix("s")))
    if found is None or scale is None or not str(key).endswith("_s"):
        return None
    return f"write {float(found[1]) * scale:g}: it is in seconds"
