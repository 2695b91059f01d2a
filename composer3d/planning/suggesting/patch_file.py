"""A patch as a manifest of its own: it extends the given one and says what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from composer3d.manifest import Document, dump, stated_by

__all__ = ["extended_by", "patch_text"]

_PATHS = (("data", "use"), ("data", "tokenizer"), ("model", "hf"))  # keys that may be paths beside a manifest


def extended_by(document: Document, folder: Path) -> tuple[str, list[str]]:
    """Return how a manifest in a folder extends a given one, and what it has to say for paths to be the same files.

    Args:
        document: The given manifest, of a file or shipped, with its overrides.
        folder: Of the new manifest.
    """
    base = Path(document.file)
    is_shipped = base.suffix != ".toml"
    moved = []
    for table, key in _PATHS if folder.resolve() != document.folder.resolve() else ():
        value = dict(document.tables.get(table) or {}).get(key)
        if is_shipped and not str(document.place((table, key)).file).startswith("--set"):
            continue  # its own names are not of files in the working folder
        if isinstance(value, str) and not Path(value).is_absolute() and (document.folder / value).exists():
            moved.append(f"{table}.{key} = {json.dumps(str((document.folder / value).resolve()))}")
    return document.file if is_shipped else str(base.resolve()), moved


def patch_text(base: str, changes: Sequence[str], *, overrides: Sequence[str] = ()) -> str:
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
        overrides: Of the given manifest, which the changes are beside. Secrets among them are named in a comment.
    """
    stated, secrets = stated_by(overrides)
    tables: dict[str, Any] = {"composer3d": 1, "extends": base}
    _merge(tables, stated)
    for change in changes:
        _merge(tables, tomli.loads(change))
    return "".join(f"# {key} was given by --set and is a secret: give it again\n" for key in secrets) + dump(tables)


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping):
            known = into.get(key)
            into[key] = dict(known) if isinstance(known, Mapping) else {}
            _merge(into[key], value)
        else:
            into[key] = value
