"""What a rank leaves behind while it runs: its last step, written so cheaply that a killed rank has said it too."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from composer3d.rendezvous import private_attempt

__all__ = ["LastSeen", "Progress", "RunPhase", "attempt_folder"]

_LAYOUT = struct.Struct("<qII")  # step, phase, pid: 16 bytes
_NO_STEP = -1


class RunPhase(IntEnum):
    """What a rank is doing; the report of a failure says it, and a rank that saves is given more time to end."""

    STARTING = 0
    LOADING = 1
    TRAINING = 2
    EVALUATING = 3
    SAVING = 4
    CLOSING = 5


@dataclass(frozen=True, kw_only=True)
class LastSeen:
    """What a rank wrote last: its process, the step it was in (None before the first) and its phase."""

    pid: int
    step: int | None
    phase: RunPhase

    @classmethod
    def read(cls, folder: Path, rank: int) -> LastSeen | None:
        """Read what a rank wrote into an attempt's folder; None if it never began.

        Args:
            folder: The attempt's folder, see `attempt_folder`.
            rank: The rank.
        """
        try:
            content = _file(folder, rank).read_bytes()
        except FileNotFoundError:
            return None
        if len(content) < _LAYOUT.size:
            return None
        step, phase, pid = _LAYOUT.unpack_from(content)
        return cls(pid=pid, step=None if step == _NO_STEP else step, phase=RunPhase(phase))


class Progress:
    """A rank's last step and phase, in 16 bytes of memory that are also a file.

    The file is mapped: an update is a store into memory (below one microsecond, no system call), and the kernel keeps
    it when the process is killed. A second object of the same rank goes on where the first is.

    Args:
        output: The run's output folder.
        rank: The rank that writes.

    Memory: one page. Collectives: none.
    """

    def __init__(self, output: Path, rank: int) -> None:
        folder = attempt_folder(output)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(_file(folder, rank), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size < _LAYOUT.size:
                os.pwrite(descriptor, _LAYOUT.pack(_NO_STEP, RunPhase.STARTING, os.getpid()), 0)
            self._memory = mmap.mmap(descriptor, _LAYOUT.size)
        finally:
            os.close(descriptor)
        self._pid = os.getpid()

    def update(self, step: int, phase: RunPhase = RunPhase.TRAINING) -> None:
        """Say which step this rank is in, and what it does there.

        Args:
            step: The step, counted from 0.
            phase: What the rank does.
        """
        _LAYOUT.pack_into(self._memory, 0, step, phase, self._pid)

    def close(self) -> None:
        """Unmap the file; what was written stays."""
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
    under torchrun they lie in the run's folder, which ranks of several machines share.

    Args:
        output: The run's output folder.
        restart: How often the launcher restarted the ranks; by default what it put into this rank's environment.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "alone")
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if restart is None else str(restart)
    return private_attempt(run_id, count) or output / "ranks" / f"{run_id}-{count}"


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.progress"
