"""A patch as a manifest of its own: it extends the given one and says what differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli

from composer3d.manifest import Document, dump

__all__ = ["extended_by", "patch_text"]

_PATHS = (("data", "use"), ("data", "tokenizer"), ("model", "hf"))  # keys that may be paths beside a manifest


def extended_by(document: Document, folder: Path) -> tuple[str, list[str]]:
    """Return how a manifest in a folder extends a given one, and what it has to say for paths to be the same files.

    Args:
        document: The given manifest, of a file or shipped.
        folder: Of the new manifest.
    """
    base = Path(document.file)
    if base.suffix != ".toml":
        return document.file, []
    moved = []
    for table, key in _PATHS if folder.resolve() != document.folder.resolve() else ():
        value = dict(document.tables.get(table) or {}).get(key)
        if isinstance(value, str) and not Path(value).is_absolute() and (document.folder / value).exists():
            moved.append(f"{table}.{key} = {json.dumps(str((document.folder / value).resolve()))}")
    return str(base.resolve()), moved


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
