"""Detection of foreign files, which a save must not replace."""

from __future__ import annotations

import os
import re
from pathlib import Path

from composer3d.errors import CheckpointError

__all__ = ["foreign_in", "own_files", "refuse_foreign", "refuse_foreign_marker"]

# Those of torch's DCP, which writes `.metadata.tmp` first; `.nfs...` is what NFS calls a removed file that is open.
_OWN = re.compile(r"__\d+_\d+\.distcp|\.metadata|state\.json|checksums\.json|\.nfs\w+")
_SHOWN = 3  # names in a message
_MARKER_BYTES = 1024
_DIGEST = re.compile(r"[0-9a-f]{16,}")


def foreign_in(path: Path) -> str:
    """Describe the content of a path that no save wrote; "" for a checkpoint, complete or not, and for nothing.

    A link counts as its target, and an empty file or folder as nothing.
    """
    if not path.exists():
        return ""
    if not path.is_dir():
        return "is a file" if path.stat().st_size or not path.is_file() else ""
    names = sorted(each.name for each in path.iterdir() if not _OWN.fullmatch(each.name.removesuffix(".tmp")))
    shown = ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return f"holds {shown}" if names else ""


def own_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint that saves wrote, its index first: without it the rest is no checkpoint."""
    own = [each for each in folder.iterdir() if _OWN.fullmatch(each.name.removesuffix(".tmp")) and not each.is_dir()]
    return sorted(own, key=lambda each: (not each.name.startswith(".metadata"), each.name))


def refuse_foreign(path: Path, *, beside: bool = False) -> None:
    """Refuse to replace anything but a checkpoint.

    Args:
        path: Of a checkpoint to be saved; there may be none, an empty folder, or an earlier checkpoint.
        beside: Whether the path is one that a save of another name uses meanwhile, where empty files and links are what
            a killed one left.

    Raises:
        CheckpointError: The path has other content, which the message describes.
    """
    found = foreign_in(path)
    if not beside and not found and os.path.lexists(path) and not (path.is_dir() and _is_own(path)):
        found = "is a link" if path.is_symlink() else "is a file"
    if found:
        inner = f", for example {path / 'step-100'}" if path.is_dir() and not beside else ""
        uses = "a save writes there first" if beside else "a save replaces what is there"
        raise CheckpointError(
            f"{path}: {found}, which no save wrote: {uses}, and would delete it; move it away, or save under a name "
            f"that is not taken{inner}"
        )


def _is_own(folder: Path) -> bool:
    """Return whether a folder without foreign files may be replaced: a link to an empty one was made on purpose."""
    return not folder.is_symlink() or any(folder.iterdir())


def refuse_foreign_marker(file: Path) -> None:
    """Refuse to replace a file, folder or link of the marker's name that is none.

    Raises:
        CheckpointError: With what to do.
    """
    if not os.path.lexists(file):
        return
    is_marker = file.is_file() and not file.is_symlink() and file.stat().st_size <= _MARKER_BYTES
    if is_marker:
        name, _, rest = file.read_bytes().decode("utf-8", "replace").partition("\n")
        # One of an earlier composer3d has the name alone.
        is_marker = not name or bool(_DIGEST.fullmatch(rest.strip())) or (not rest and (file.parent / name).is_dir())
    if not is_marker:
        raise CheckpointError(
            f"{file}: is not the marker of a folder of checkpoints, which a save writes there; move it away, or save "
            f"into another folder, for example {file.parent / 'checkpoints' / 'step-100'}"
        )
