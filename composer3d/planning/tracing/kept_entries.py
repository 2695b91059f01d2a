"""Entries on disk that spare work: JSON of one type, in a folder of this user alone, bounded in number and bytes.

An entry is whole or absent, whoever else writes: it is written under a name of its own, and renamed. It begins with a
digest of its name and content, so that one which is damaged, or was put under another name, is made anew.
`COMPOSER3D_TRACES` names another folder to put them in, or is `off`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from composer3d.errors import ComposerError

__all__ = ["VARIABLE", "Entries"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

VARIABLE, _OFF = "COMPOSER3D_TRACES", "off"
_MOST_ENTRIES, _MOST_BYTES = 64, 64 * 2**20
_ABANDONED_S = 3600.0  # a writer takes less than a second


class Entries(Generic[T]):
    """Entries of one type.

    Args:
        kind: The type, which pydantic validates; entries of another type have other names.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._folder = _folder()

    @property
    def are_kept(self) -> bool:
        """Whether there is a folder for them."""
        return self._folder is not None

    def read(self, key: str) -> T | None:
        """Return an entry; None where there is none, or one that is not what was written."""
        from pydantic import TypeAdapter

        content = None if self._folder is None else _read(self._folder, f"{key}.json")
        if content is None:
            return None
        try:
            found: T = TypeAdapter(self._kind).validate_json(content, strict=True)
        except ValueError as error:
            logger.warning("%s.json holds another type of entry, and is made anew: %s", key, error)
            return None
        return found

    def write(self, key: str, value: T) -> None:
        """Keep an entry; the oldest go, where they are too many or too large, and so does what dead writers left."""
        from pydantic import TypeAdapter

        if self._folder is not None:
            _write(self._folder, f"{key}.json", TypeAdapter(self._kind).dump_json(value))


def _folder() -> Path | None:
    """Return the folder of entries, this user's alone; None where there is none, with the reason in the log."""
    from composer3d.processes import private_folder_in

    parent = os.environ.get(VARIABLE) or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if parent.lower() == _OFF:
        return None
    try:
        os.makedirs(parent, exist_ok=True)
        return private_folder_in(Path(parent), "composer3d-traces")
    except (ComposerError, OSError) as error:
        logger.info("traces are not kept: %s", error)
        return None


def _read(folder: Path, name: str) -> bytes | None:
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        digest, _, content = file.read().partition(b"\n")
    if digest != _digest(name, content):
        logger.warning("%s is not what was written there; it is made anew", folder / name)
        return None
    with suppress(OSError):
        os.utime(folder / name)  # the oldest are removed
    return content


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).hexdigest().encode()


def _write(folder: Path, name: str, content: bytes) -> None:
    if len(content) > _MOST_BYTES:
        logger.info("an entry of %d bytes is not kept; all together may have %d", len(content), _MOST_BYTES)
        return
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_digest(name, content) + b"\n" + content)
        os.replace(temporary, folder / name)
        _tidy(folder)
    except OSError as error:
        logger.info("traces are not kept: %s", error)
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def _tidy(folder: Path) -> None:
    """Remove the entries that were not used for the longest, and temporary files whose writers are gone."""
    number = size = 0
    for path, state in sorted(_files(folder), key=lambda file: -file[1].st_mtime_ns):
        if path.name.startswith("."):
            if state.st_mtime < time.time() - _ABANDONED_S:
                path.unlink(missing_ok=True)
            continue
        number, size = number + 1, size + state.st_size
        if number > _MOST_ENTRIES or size > _MOST_BYTES:
            path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has removed it
            yield path, path.lstat()
