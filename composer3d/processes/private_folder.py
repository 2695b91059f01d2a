"""Folders and files of this user alone, which no other user can have prepared, or read."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from composer3d.errors import ForkError

__all__ = ["open_private", "private_folder_in", "user_folder", "write_private"]

_ADVICE = "remove it, or set TMPDIR to a folder of your own"


def user_folder(name: str) -> Path:
    """Return a folder in the temporary folder that belongs to this user alone; made if it is not there.

    Its name is known beforehand, so that processes of this user meet there; whatever another user has put in its place,
    a symbolic link or a folder, is refused. Inside of it nobody else can change anything.

    Args:
        name: Of the folder; the user's number is added.

    Raises:
        ForkError: What is there is no folder, belongs to another user, or others may read or write in it.
    """
    return private_folder_in(Path(tempfile.gettempdir()), name)


def private_folder_in(parent: Path, name: str, *, advice: str = _ADVICE, is_made: bool = True) -> Path:
    """Return a folder that belongs to this user alone, as `user_folder`, inside of another one.

    Args:
        parent: A folder that all users may write to.
        name: Of the folder; the user's number is added.
        advice: What to do where the folder is refused.
        is_made: Make it if it is not there; otherwise only look.

    Raises:
        ForkError: As of `user_folder`.
    """
    folder = parent / f"{name}-{os.getuid()}"
    if is_made:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    if is_made or os.path.lexists(folder):
        os.close(_open_folder(folder, advice))
    return folder


def open_private(folder: Path, name: str) -> int:
    """Open a file in a folder of `user_folder` for reading and writing; no link is followed, and nothing truncated.

    Args:
        folder: The folder.
        name: Of the file; made if it is not there.

    Raises:
        ForkError: The folder is not this user's alone.
        OSError: The file is a symbolic link.
    """
    there = _open_folder(folder)
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=there)
    finally:
        os.close(there)


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone may read; a link in its place is an error, and not followed.

    Args:
        path: The file; one that is there is replaced, its mode too.
        text: Its content.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)


def _open_folder(folder: Path, advice: str = _ADVICE) -> int:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ForkError(f"{folder}: is no folder of this user's ({error.strerror}); {advice}") from error
    found = os.fstat(descriptor)
    if found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077:
        return descriptor
    os.close(descriptor)
    if found.st_uid != os.getuid():
        raise ForkError(f"{folder}: belongs to user {found.st_uid}, not to this one ({os.getuid()}); {advice}")
    raise ForkError(f"{folder}: other users have access (mode {stat.S_IMODE(found.st_mode):o}); {advice}")
