"""Identity of token files, so that other contents are noticed: between ranks, after a resume, and while a run reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from os.path import commonpath
from pathlib import Path
from typing import Any

__all__ = ["file_facts"]

# Read whole up to this size over all files: about a second. Of more, blocks are read, and times of change are kept.
_WHOLE_BYTES = 1 << 29
_BLOCK_BYTES = 1 << 16
_NUM_BLOCKS = 64
_MAX_NAMED = 1000


def file_facts(files: Sequence[Path]) -> Mapping[str, Any]:
    """Return what a record says of files: a digest over all of them, and one of each, by its name in their folder.

    Beyond 512 MiB all in all only 64 blocks of each file count, and its size; the key then is `sha256_sampled`.

    Args:
        files: In the order in which they are read.

    Memory: a block.
    """
    is_whole = sum(file.stat().st_size for file in files) <= _WHOLE_BYTES
    found = {name: _whole(file) if is_whole else _sampled(file) for name, file in _named(files).items()}
    total = hashlib.sha256(" ".join(found.values()).encode()).hexdigest()
    facts: dict[str, Any] = {"sha256" if is_whole else "sha256_sampled": total}
    if len(found) <= _MAX_NAMED:
        facts["files"] = {name: digest[:16] for name, digest in found.items()}
    return facts


def _named(files: Sequence[Path]) -> dict[str, Path]:
    folder = Path(commonpath([file.parent for file in files]))
    return {str(file.relative_to(folder)): file for file in files}


def _whole(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    step = max(_BLOCK_BYTES, (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
