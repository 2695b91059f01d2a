"""Errors of the machine that a run is on: full disks, folders that are gone or read-only, too few open files.

They reach Python as OSError, and through torch, a checkpoint or a worker as another exception whose text alone still
has the system's words; both become one error that says what is missing, where, and what to do.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from composer3d.errors import MachineError

__all__ = ["machine_error"]

# The system's words, as they stand in texts without a number.
_WORDS = {
    os.strerror(number): number
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EFBIG)
}
# These may be anybody's mistake, but for files of the run's own folder.
_IN_OUTPUT = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EIO)
_NUMBERED = re.compile(r"\[Errno (\d+)\][^'\n]*(?:'([^'\n]+)')?")


@dataclass(frozen=True, kw_only=True)
class _Found:
    number: int
    path: Path | None


def machine_error(error: BaseException, output: Path | None = None) -> MachineError | None:
    """Return what the machine is to blame for in an exception or in those that it came from; None for anything else.

    Args:
        error: What was raised.
        output: The run's folder, where there is one.
    """
    for link in _chain(error):
        if isinstance(link, MachineError):
            return link
        for found in _found(link):
            of_run = output is not None and found.path is not None and _is_inside(found.path, output)
            if found.number in _WORDS.values() or (of_run and found.number in _IN_OUTPUT):
                text = f"{type(link).__name__}: {link}".partition("\n")[0]
                return MachineError(f"{_missing(found, output)} ({text})", advice=_advice(found.number, output))
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    left: BaseException | None = error
    while left is not None and id(left) not in seen:
        seen.add(id(left))
        yield left
        left = left.__cause__ or left.__context__


def _found(error: BaseException) -> Iterator[_Found]:
    if isinstance(error, OSError) and error.errno is not None:
        name = error.filename2 or error.filename
        yield _Found(number=error.errno, path=Path(os.fsdecode(name)) if isinstance(name, (str, bytes)) else None)
        return
    text = str(error)
    subject = Path(text.partition(": ")[0])  # errors of checkpoints begin with theirs
    about = subject if "\n" not in subject.name and os.path.isdir(subject.parent) and subject.parent.name else None
    for number, path in _NUMBERED.findall(text):
        yield _Found(number=int(number), path=Path(path) if path else about)
    for words, number in _WORDS.items():
        if words in text:
            yield _Found(number=number, path=about)


def _missing(found: _Found, output: Path | None) -> str:
    place = found.path or output
    match found.number:
        case errno.ENOSPC | errno.EDQUOT:
            return f"the disk of {place} is full{_usage(place)}" if place else "a disk is full"
        case errno.EMFILE:
            return f"this process may have no more than {_open_files()} files open"
        case errno.ENFILE:
            return "this machine has too many files open"
        case errno.EFBIG:
            return f"{place or 'a file'} may not grow any more: it meets the limit of a file's size"
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return f"{place or 'a disk'} cannot be written to"
        case errno.EIO | errno.ESTALE:
            return f"the disk of {place} failed" if place else "a disk failed"
    return f"{place} is gone: it was deleted, or moved, while the run wrote to it"


def _advice(number: int, output: Path | None) -> str:
    then = "then start the same command again: it goes on from the newest checkpoint"
    match number:
        case errno.ENOSPC | errno.EDQUOT:
            return f"free space there, keep fewer checkpoints (checkpoint.keep), or choose another run.output; {then}"
        case errno.EMFILE | errno.ENFILE:
            return f"raise the limit (ulimit -n 65536), or use fewer workers (data.workers); {then}"
        case errno.EFBIG:
            return f"raise the limit (ulimit -f unlimited); {then}"
        case errno.ENOENT | errno.ENOTDIR:
            return f"leave {output or 'the folder'} where it is while a run writes to it; {then}, if one is left"
    return f"make {output or 'the folder'} writable for this user, or choose another run.output; {then}"


def _usage(place: Path | None) -> str:
    """Return how much of a disk is free, as text for behind its name; empty where that is unknown."""
    while place is not None:
        try:
            total, _, free = shutil.disk_usage(place)
        except OSError:
            place = None if place.parent == place else place.parent
            continue
        return f": {free / 2**20:,.1f} of {total / 2**20:,.1f} MiB free now"
    return ""


def _open_files() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _is_inside(path: Path, folder: Path) -> bool:
    own = os.path.abspath(folder)
    return os.path.commonpath([own, os.path.abspath(path)]) == own
