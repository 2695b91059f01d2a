"""Probes of the places that a long command writes to at its end."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["file_objection", "folder_objection"]


def file_objection(path: Path) -> str | None:
    """Return the system's words for why a file cannot be written; None where it can. Nothing is left behind.

    The file is made and removed again: permissions alone say nothing of a name that is too long, of a disk that takes
    no files, or of what root may do.

    Args:
        path: A file, which is not changed, or where one is to be made.
    """
    target = Path(os.path.realpath(path))  # a link to a file that is not there yet makes that file
    try:
        if target.exists():
            os.close(os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        else:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            target.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def folder_objection(path: Path) -> str | None:
    """Return the system's words for why files cannot be written into a folder; None where they can.

    Args:
        path: A folder, or where one is to be made, with those above it. Nothing is left behind.
    """
    made: list[Path] = []
    try:
        for part in reversed([path, *path.parents]):
            if not part.exists():
                part.mkdir()
                made.append(part)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for part in reversed(made):
            part.rmdir()
    return None
