"""Command lines and shell text, read as flags and never run."""

from __future__ import annotations

import shlex
from typing import Any

from composer3d.errors import Problem
from composer3d.importing.leaves import UnreadableSource

__all__ = ["read_flags", "value_of"]


def read_flags(text: str, file: str) -> dict[str, Any]:
    """Return `--name value` pairs of a command line by name, with underscores; a flag without a value is True.

    Args:
        text: Words as a shell splits them; a backslash continues a line.
        file: Named in problems.

    Raises:
        UnreadableSource: A quote is not closed.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UnreadableSource(Problem(message=f"is no command line: {str(error).lower()}", file=file)) from None
    flags: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, stated, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = value_of(value) if stated else True
        elif name is not None:
            flags[name] = value_of(word) if flags[name] is True else flags[name]
            name = None
    return flags


def value_of(word: str) -> Any:
    """Return a word as a number or boolean if it is one."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
