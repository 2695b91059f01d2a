"""Work that one rank of a node does while the others wait: training a tokenizer, downloading, unpacking."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from composer3d.runner.data.data_source import Report

__all__ = ["launch_key", "prepare_once"]


def prepare_once(
    work: Callable[[], None],
    *,
    done: Callable[[], bool],
    lock_path: Path,
    what: str,
    report: Report,
    rank: int = 0,
) -> None:
    """Do work on whichever rank of this node comes first; the others wait until it is done.

    A file lock of the system decides, so no process group is needed, and a rank that dies releases it: the next one
    sees that the work is not done and does it.

    Args:
        work: What to do; it must leave a state in which `done` is true.
        done: Returns whether the work is already done.
        lock_path: Path of the lock, on a disk common to the ranks of a node; its folder is created.
        what: Name of the work in messages.
        report: Takes the messages.
        rank: Of this process, for the messages.
    """
    if done():
        return
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with lock_path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"rank {rank} waits for {what} to be prepared")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not done():
            report(f"rank {rank} prepares {what}")
            work()


def launch_key() -> str:
    """Return a name of this launch that the ranks of a node share: their parent process and when it started."""
    parent = os.getppid()
    try:
        # The 22nd field of the line; the second one, a name in brackets, may hold blanks.
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "unknown"
    return f"{parent} {started}"
