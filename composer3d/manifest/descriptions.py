"""Descriptions of manifest tables and their keys, from docstrings and fields."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["describe_keys", "fields", "summary"]

_ENTRY = re.compile(r"(\w+)(?: \([^)]*\))?:\s*(.*)")
_SECTION = re.compile(r"[A-Z]\w*:")


def fields(cls: Any) -> Mapping[str, Any]:
    """Return pydantic's fields of a table class by the key that the manifest has, which is the alias if there is one.

    Empty for anything that is no table class.
    """
    found: Mapping[str, Any] = getattr(cls, "__pydantic_fields__", {}) if isinstance(cls, type) else {}
    return {_key(name, info): info for name, info in found.items()}


def describe_keys(cls: type) -> dict[str, str]:
    """Return the description of every key that has one: `Field(description=...)`, else its entry under `Args:`.

    The docstrings of base classes count for the fields that they bring.
    """
    entries: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        entries |= _arguments(base.__doc__ or "")
    described = {
        _key(name, info): info.description or entries.get(name)
        for name, info in cls.__pydantic_fields__.items()  # type: ignore[attr-defined]
    }
    return {key: text for key, text in described.items() if text}


def summary(cls: type) -> str:
    """Return the docstring up to its first section."""
    lines = inspect.cleandoc(cls.__doc__ or "").split("\n")
    ends = [index for index, line in enumerate(lines) if _SECTION.fullmatch(line)]
    return "\n".join(lines[: ends[0]] if ends else lines).strip()


def _arguments(docstring: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    name, indent, inside = "", 0, False
    for line in inspect.cleandoc(docstring).split("\n"):
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if depth == 0:
            inside, indent = line.strip() == "Args:", 0
        elif inside:
            indent = indent or depth
            match = _ENTRY.match(line.strip()) if depth == indent else None
            if match:
                name, entries[match[1]] = match[1], match[2]
            elif name:
                entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries


def _key(name: str, info: Any) -> str:
    return next((alias for alias in (info.validation_alias, info.alias) if isinstance(alias, str)), name)
