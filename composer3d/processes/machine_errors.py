"""Errors of the machine that a run is on: full disks, folders that are gone or read-only, too few open files.

They reach Python as OSError, and through torch, a checkpoint or a worker as another exception whose text alone still
has the system's words; both become one error that says what is missing, where, and what to do.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
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
_FULL = (errno.ENOSPC, errno.EDQUOT)
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
                place = _fullest(output) if found.path is None and found.number in _FULL else found.path or output
                message = f"{_missing(found.number, place)} ({text})"
                return MachineError(message, advice=_advice(found.number, place, output))
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


def _missing(number: int, place: Path | None) -> str:
    match number:
        case errno.ENOSPC | errno.EDQUOT:
            return _full(place)
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
    if place is not None and (disk := _disk(place)) is not None and not disk.f_blocks and not disk.f_files:
        return f"{place} cannot be made: its file system takes no files"
    return f"{place} is gone: it was deleted, or moved, while the run wrote to it"


def _advice(number: int, place: Path | None, output: Path | None) -> str:
    then = "then start the same command again: it goes on from the newest checkpoint"
    match number:
        case errno.ENOSPC | errno.EDQUOT:
            if place is None or place == output or (output is not None and _is_inside(place, output)):
                return (
                    f"free space there, keep fewer checkpoints (checkpoint.keep), or choose another run.output; {then}"
                )
            is_temporary = place == Path(tempfile.gettempdir())
            return f"free space there{', or set TMPDIR to a folder of another disk' if is_temporary else ''}; {then}"
        case errno.EMFILE | errno.ENFILE:
            return f"raise the limit (ulimit -n 65536), or use fewer workers (data.workers); {then}"
        case errno.EFBIG:
            return f"raise the limit (ulimit -f unlimited); {then}"
        case errno.ENOENT | errno.ENOTDIR:
            return f"leave {output or 'the folder'} where it is while a run writes to it; {then}, if one is left"
    return f"make {output or 'the folder'} writable for this user, or choose another run.output; {then}"


def _fullest(output: Path | None) -> Path | None:
    """Return the folder with least left, of those that a run writes to: where an error names no file, it was there."""
    places = [place for place in (output, Path(tempfile.gettempdir()), Path("/dev/shm")) if place is not None]
    return min((place for place in places if _disk(place)), key=_left, default=output)


def _left(place: Path) -> float:
    """Return the smaller of the shares of a disk's bytes and of its files that are left."""
    disk = _disk(place)
    assert disk is not None, "chosen among those that have one"
    # File systems without a size, such as those of a kernel's tables, have 0 of both.
    files = disk.f_favail / disk.f_files if disk.f_files else 1.0
    return min(files, disk.f_bavail / disk.f_blocks if disk.f_blocks else 1.0)


def _full(place: Path | None) -> str:
    """Return which disk is full, and how much of it is left."""
    disk = None if place is None else _disk(place)
    if place is None or disk is None:
        return "a disk is full" if place is None else f"the disk of {place} is full"
    if disk.f_files and not disk.f_favail:
        return f"the disk of {place} holds as many files as it may: {disk.f_files:,} inodes, none free"
    sizes = [blocks * disk.f_frsize / 2**20 for blocks in (disk.f_bavail, disk.f_blocks)]
    return f"the disk of {place} is full: {sizes[0]:,.1f} of {sizes[1]:,.1f} MiB free now"


def _disk(place: Path) -> os.statvfs_result | None:
    """Return the numbers of the disk that a file is on, or would be."""
    for each in (place, *place.absolute().parents):
        try:
            return os.statvfs(each)
        except OSError:
            continue
    return None


def _open_files() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _is_inside(path: Path, folder: Path) -> bool:
    own = os.path.abspath(folder)
    return os.path.commonpath([own, os.path.abspath(path)]) == own
