"""`state.json`: everything of a checkpoint that is not a tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer3d.checkpoint.folder import STATE, require
from composer3d.errors import CheckpointError

__all__ = ["encode_state", "read_state", "write_state"]

FORMAT = 1
SCALARS = (str, int, float, bool, type(None))


def encode_state(state: Mapping[str, Any], name: str = "state") -> str:
    """Return a state as JSON text. Tuples become lists; NaN and infinities are kept.

    Args:
        state: Nested dicts with string keys.
        name: What errors call it.

    Raises:
        CheckpointError: A value that JSON cannot carry without loss, with the path of its keys.
    """
    _refuse(state, name)
    return json.dumps({"composer3d": FORMAT, "state": state}, indent=1)


def write_state(folder: Path, text: str) -> None:
    """Write `state.json` into a folder and wait until it is on disk."""
    with (folder / STATE).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state, without its tensors.

    Raises:
        CheckpointError: There is no complete checkpoint, or its state cannot be read.
    """
    require(path)
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        version, state = content["composer3d"], content["state"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE}: damaged: {type(error).__name__}: {error}") from error
    if version != FORMAT or not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE}: written in format {version!r}; this composer3d reads format {FORMAT}")
    return state


def _refuse(value: object, place: str) -> None:
    if type(value) in SCALARS:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{place} has the key {key!r}, a {type(key).__name__}; JSON keys are strings")
            _refuse(inner, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _refuse(inner, f"{place}.{index}")
    else:
        raise CheckpointError(
            f"{place} is a {type(value).__name__}, which JSON cannot carry; "
            "make it a string, number, bool, list or dict, or save it among the tensors"
        )
