"""Checkpoints that are made bad on purpose."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from composer3d.checkpoint.checksums import Checksums, digest, read_checksums

__all__ = ["metadata_of", "reseal", "without_digests", "write_metadata"]


def metadata_of(path: Path) -> Any:
    """Return `.metadata` as torch's own reader unpickles it."""
    return FileSystemReader(path).read_metadata()


def reseal(path: Path, *names: str) -> None:
    """Give files that were changed on purpose, small ones or those that hold one tensor, their new digests."""
    checksums = read_checksums(path)
    assert checksums is not None
    new = {name: [(len(data), digest(data))] for name in names for data in [(path / name).read_bytes()]}
    Checksums(folder=path, files={**checksums.files, **new}).write()


def write_metadata(path: Path, metadata: Any) -> None:
    """Write a `.metadata` with its digest, as one who means harm would."""
    (path / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))
    if (path / "checksums.json").exists():
        reseal(path, ".metadata")


def without_digests(path: Path) -> None:
    """Rewrite a checkpoint in the format of composer3d without digests."""
    (path / "checksums.json").unlink()
    state = path / "state.json"
    state.write_text(state.read_text().replace('"composer3d": 2', '"composer3d": 1', 1))
