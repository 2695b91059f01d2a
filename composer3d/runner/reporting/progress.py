"""Progress of a rank in a memory-mapped file: its last step and phase, which outlive a killed process."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from composer3d.processes import launch_id, launch_round, private_attempt

__all__ = [
    "NOTICE",
    "LastSeen",
    "Progress",
    "RunPhase",
    "attempt_before",
    "attempt_folder",
    "leave_notice",
    "left_reason",
]

NOTICE = "notice"  # suffix of a rank's file that is there once it looks for the cause of a failed collective

_LAYOUT = struct.Struct("<qII")  # step, phase, pid: 16 bytes
_LENGTH = struct.Struct("<Q")  # of the text behind it
_SIZE = 1 << 17  # bytes of a rank's file, with space for the reason of its end
_NO_STEP = -1


class RunPhase(IntEnum):
    """Current phase of a rank; failure reports show it, and a rank that saves gets more time to end."""

    STARTING = 0
    LOADING = 1
    TRAINING = 2
    EVALUATING = 3
    SAVING = 4
    CLOSING = 5


@dataclass(frozen=True, kw_only=True)
class LastSeen:
    """Last entry of a rank: its process, its step (None before the first) and its phase."""

    pid: int
    step: int | None
    phase: RunPhase

    @classmethod
    def read(cls, folder: Path, rank: int) -> LastSeen | None:
        """Read what a rank wrote into an attempt's folder; None if it never began.

        Args:
            folder: The attempt's folder, see `attempt_folder`.
            rank: Of the world, from 0.
        """
        try:
            with _file(folder, rank).open("rb", buffering=0) as file:
                content = file.read(_LAYOUT.size)
        except OSError:
            return None
        if len(content) < _LAYOUT.size:
            return None
        step, phase, pid = _LAYOUT.unpack_from(content)
        if phase not in list(RunPhase):
            return None  # a damaged file
        return cls(pid=pid, step=None if step == _NO_STEP else step, phase=RunPhase(phase))


class Progress:
    """A rank's last step and phase, and the reason of its end, in memory that is also a file.

    The file is mapped: an update is a store into memory (below one microsecond, no system call), and the kernel keeps
    it when the process is killed. Its space is taken when the rank starts, so that the reason finds room on a full
    disk and without a file descriptor left. A second object of the same rank goes on where the first is.

    Args:
        output: The run's output folder.
        rank: The rank that writes.

    Memory: 128 KiB. Collectives: none.
    """

    def __init__(self, output: Path, rank: int) -> None:
        folder = attempt_folder(output)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(_file(folder, rank), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                os.posix_fallocate(descriptor, 0, _SIZE)
                os.pwrite(descriptor, _LAYOUT.pack(_NO_STEP, RunPhase.STARTING, os.getpid()), 0)
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._pid = os.getpid()

    def update(self, step: int, phase: RunPhase = RunPhase.TRAINING) -> None:
        """Record this rank's step and phase.

        Args:
            step: The step, counted from 0.
            phase: What the rank does.
        """
        _LAYOUT.pack_into(self._memory, 0, step, phase, self._pid)

    def leave(self, reason: str) -> None:
        """Write why this rank ends.

        Args:
            reason: Text, of which as much is kept as there is room for.
        """
        content = reason.encode()[: _SIZE - _LAYOUT.size - _LENGTH.size]
        start = _LAYOUT.size + _LENGTH.size
        self._memory[start : start + len(content)] = content
        _LENGTH.pack_into(self._memory, _LAYOUT.size, len(content))  # last: a reader sees all of it or nothing

    def close(self) -> None:
        """Unmap the file, which keeps the last entry."""
        self._memory.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def attempt_folder(output: Path, restart: int | None = None) -> Path:
    """Return the folder of this attempt's rank files; each start and restart has its own, so none reads stale files.

    The local launcher has one of its own for them, which outlives a run's folder that is deleted or on a full disk;
    under another launcher they lie in the run's folder, which ranks of several machines share.

    Args:
        output: The run's output folder.
        restart: How often the launcher restarted the ranks; by default what it put into this rank's environment.
    """
    run_id, restarts = launch_id()
    count = str(restarts if restart is None else restart)
    return private_attempt(run_id, count) or output / "ranks" / f"{run_id}-{launch_round() or count}"


def attempt_before(output: Path) -> Path | None:
    """Return the folder of the attempt of this launch that was started before this one; None for the first.

    Args:
        output: The run's output folder.
    """
    run_id, restarts = launch_id()
    if launch_round() is None:
        return attempt_folder(output, restart=restarts - 1) if restarts else None
    own = attempt_folder(output)
    others = [path for path in (output / "ranks").glob(f"{run_id}-*") if path != own and path.is_dir()]
    return max(others, key=lambda path: path.stat().st_mtime_ns, default=None)


def leave_notice(folder: Path, rank: int) -> None:
    """Note in the attempt's folder that a rank is going to report why a collective of its failed.

    Args:
        folder: The attempt's folder, see `attempt_folder`.
        rank: Of the world, from 0.
    """
    with suppress(OSError):  # of a full disk: it then has as long as ranks that have noticed nothing
        (folder / f"rank-{rank}.{NOTICE}").touch()


def left_reason(folder: Path, rank: int) -> str:
    """Return a rank's final entry; empty if there is none.

    Args:
        folder: The attempt's folder, see `attempt_folder`.
        rank: Of the world, from 0.
    """
    start = _LAYOUT.size + _LENGTH.size
    try:
        with _file(folder, rank).open("rb", buffering=0) as file:
            head = file.read(start)
            length = _LENGTH.unpack_from(head, _LAYOUT.size)[0] if len(head) == start else 0
            return file.read(length).decode(errors="replace") if length else ""
    except OSError:
        return ""


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.progress"
