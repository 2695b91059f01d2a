"""A patch as a manifest of its own: it extends the given one and says what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tomli

from composer3d.manifest import dump

__all__ = ["patch_text"]


def patch_text(base: str, changes: Sequence[str]) -> str:
    """Return a manifest that extends another.

    >>> print(patch_text("run.toml", ["mesh.tp=8", 'scheduling.pipeline.schedule="1F1B"']), end="")
    composer3d = 1
    extends = "run.toml"
    <BLANKLINE>
    [mesh]
    tp = 8
    <BLANKLINE>
    [scheduling.pipeline]
    schedule = "1F1B"

    Args:
        base: The path, or the shipped name, of the given manifest.
        changes: As `--set` takes them.
    """
    tables: dict[str, Any] = {"composer3d": 1, "extends": base}
    for change in changes:
        _merge(tables, tomli.loads(change))
    return dump(tables)


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
