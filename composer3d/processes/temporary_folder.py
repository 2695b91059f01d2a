"""Folders in the temporary folder that do not outlive their process, even one that was killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

__all__ = ["is_at", "remove_if_abandoned", "temporary_folder"]

# Seconds that an abandoned folder of a kind is kept: `composer3d doctor` reads what a killed launch left.
_KEPT_S = MappingProxyType({"launch": 86400.0})
_NAME = re.compile(r"composer3d-([a-z]+)\.\w{8}")  # a dot, which folders of `user_folder` have not


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Make a folder that this user alone can read, and remove it afterwards.

    Its lock is held meanwhile, by this process and by those forked from it, and the kernel releases it with the last
    of them. What a killed process left is therefore known by its free lock, and removed when the next folder is made.

    Args:
        kind: A word for its name.
    """
    _remove_abandoned()
    owner = os.getpid()
    folder, descriptor = _locked(kind)
    try:
        yield folder
    finally:
        if os.getpid() == owner:  # not in a forked rank that unwinds
            shutil.rmtree(folder, ignore_errors=True)  # ranks that are just dying may still write
            os.close(descriptor)


def _remove_abandoned() -> None:
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [(Path(entry.path), match[1]) for entry in entries if (match := _NAME.fullmatch(entry.name))]
    for path, kind in found:
        remove_if_abandoned(path, kept_s=_KEPT_S.get(kind, 0.0))


def remove_if_abandoned(path: Path, *, kept_s: float = 0.0) -> None:
    """Remove a folder if `temporary_folder` made it for this user, and no process holds it; anything else stays.

    Args:
        path: In the temporary folder.
        kept_s: Seconds since its last change for which it stays.
    """
    if path.parent != Path(tempfile.gettempdir()) or not _NAME.fullmatch(path.name):
        return
    with suppress(OSError):  # a link, a file, held, or gone meanwhile
        descriptor = _open(path)
        try:
            status = os.fstat(descriptor)
            if status.st_uid == os.getuid() and time.time() - status.st_mtime >= kept_s:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file or folder is the one that a path names.

    Args:
        descriptor: The open one.
        path: Not followed where it is a symbolic link.
    """
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)


def _locked(kind: str) -> tuple[Path, int]:
    """Make a folder and take its lock; again where another process found it without one, and removed it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"composer3d-{kind}."))
        try:
            descriptor = _open(folder)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # a disk without locks, on which nobody will find the folder without one
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_at(descriptor, folder):
            return folder, descriptor
        os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
