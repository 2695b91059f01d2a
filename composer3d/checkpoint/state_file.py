"""`state.json`: everything of a checkpoint that is not a tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer3d.checkpoint.checkpoint_folder import STATE, require
from composer3d.checkpoint.checksums import CHECKSUMS, Part, open_file, read_checksums, write_file
from composer3d.errors import CheckpointError
from composer3d.processes.json_exchange import require_json

__all__ = ["encode_state", "read_state", "write_state"]

FORMAT = 2
UNVERIFIED = 1  # of an earlier composer3d, whose checkpoints had no digests


def encode_state(state: Mapping[str, Any], name: str = "state") -> str:
    """Return a state as JSON text. Tuples become lists; NaN and infinities are kept.

    Args:
        state: Nested dicts with string keys.
        name: What errors call it.

    Raises:
        CheckpointError: A value that JSON cannot carry without loss, with the path of its keys.
    """
    try:
        require_json(state, name, advice="; make it a string, number, bool, list or dict, or save it among the tensors")
    except TypeError as error:
        raise CheckpointError(str(error)) from None
    return json.dumps({"composer3d": FORMAT, "state": state}, indent=1)


def write_state(folder: Path, text: str) -> list[Part]:
    """Write `state.json` into a folder, wait until it is on disk, and return its entry in the list of digests.

    Its owner alone may read it, as `manifest.toml`: it holds what the manifest gives to a user's code.
    """
    return write_file(folder / STATE, text.encode(), mode=0o600)


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state, without its tensors.

    Raises:
        CheckpointError: There is no complete checkpoint, or its state cannot be read.
    """
    require(path)
    checksums, file = read_checksums(path), path / STATE
    with open_file(file) as opened:
        data = opened.read()
    if checksums is not None:
        checksums.verify(STATE, data)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged: {type(error).__name__}: {error}") from error
    missing = [key for key in ("composer3d", "state") if not isinstance(content, dict) or key not in content]
    if missing:
        held = f'has no "{missing[0]}"' if isinstance(content, dict) else f"is {json.dumps(content):.60}"
        raise CheckpointError(f'{file}: damaged: it {held}; it must be an object with "composer3d" and "state"')
    version, state = content["composer3d"], content["state"]
    if version not in (FORMAT, UNVERIFIED):
        raise CheckpointError(f"{file}: written in format {version!r:.60}; this composer3d reads format {FORMAT}")
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: damaged: its state is a {type(state).__name__}, not an object")
    if checksums is None and version != UNVERIFIED:
        raise CheckpointError(
            f"{path / CHECKSUMS}: missing: without it nothing says whether the other files are damaged"
        )
    return state
