"""TOML text from values: tomli only reads."""

from __future__ import annotations

import datetime
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["dotted", "dump", "inline"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MOST_BITS = 4096  # of decimal digits Python writes 4,300 at most


def dotted(path: Sequence[str | int]) -> str:
    """Return a key path as a user writes it: bare keys bare, other keys quoted, elements in brackets.

    >>> dotted(("sharding", "tensor_parallel", "plan", "layers.*", 0))
    'sharding.tensor_parallel.plan."layers.*"[0]'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{_key(part)}" for part in path).removeprefix(".")


def inline(value: Any) -> str:
    """Return a value as TOML on one line.

    >>> inline({"a": [1, "x", True]})
    '{ a = [1, "x", true] }'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also requires DEL to be escaped.
        return "".join(map(_escaped, json.dumps(value, ensure_ascii=False)))
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return hex(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {inline(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def dump(tables: Mapping[str, Any]) -> str:
    """Return a TOML document that reads back equal: keys before tables, arrays and their tables on one line."""
    blocks: list[str] = []
    _add_block(blocks, (), tables)
    return "\n".join(blocks)


def _add_block(blocks: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    keys = [f"{_key(key)} = {inline(value)}\n" for key, value in table.items() if not isinstance(value, Mapping)]
    # A table that holds only tables is there through their headers.
    if keys or not table:
        header = f"[{dotted(path)}]\n" if path else ""
        if header or keys:
            blocks.append(header + "".join(keys))
    for key, value in table.items():
        if isinstance(value, Mapping):
            _add_block(blocks, (*path, key), value)


def _escaped(character: str) -> str:
    """Escape characters that a terminal interprets: control codes and marks of text direction."""
    if unicodedata.category(character) not in ("Cc", "Cf", "Zl", "Zp"):
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else inline(key)
