"""Files and folders that a manifest names beside itself, as one that extends it from another folder names them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["seen_from"]

_EACH = "*"  # of a list
# Keys whose value may be a file or folder beside the manifest.
_FILES = (("data", "use"), ("data", "tokenizer"), ("data", "blend", _EACH, "use"), ("model", "hf"))
# What an indexed data set of Megatron-LM's adds to the name by which it is stated.
_SUFFIXES = ("", ".bin", ".idx")


def seen_from(folders: Sequence[Path], tables: Mapping[str, Any], *, base: Path) -> dict[str, Any]:
    """Return tables of a base with its files as they are named from another folder.

    Args:
        folders: Of the manifest that extends, the last one, and of those that extend it: what is in one of them is
            theirs, and keeps its name.
        tables: Of the base.
        base: Its folder.
    """
    result: Any = dict(tables)
    for path in _FILES:
        result = _moved(result, path, folders, base)
    return dict(result)


def _moved(value: Any, path: tuple[str, ...], folders: Sequence[Path], base: Path) -> Any:
    if not path:
        if not isinstance(value, str) or os.path.isabs(value) or "\0" in value:
            return value
        is_theirs = any(_is_there(folder / value) for folder in folders)
        return value if is_theirs or not _is_there(base / value) else os.path.relpath(base / value, folders[-1])
    first, *rest = path
    if first == _EACH and isinstance(value, list):
        return [_moved(each, tuple(rest), folders, base) for each in value]
    if isinstance(value, Mapping) and first in value:
        return {**value, first: _moved(value[first], tuple(rest), folders, base)}
    return value


def _is_there(place: Path) -> bool:
    try:
        return any(Path(f"{place}{suffix}").exists() for suffix in _SUFFIXES)
    except OSError:  # a name that is too long
        return False
