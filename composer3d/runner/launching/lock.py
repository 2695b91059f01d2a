"""The lock on a run's folder: one run at a time writes there, whatever started it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from composer3d.errors import LockError
from composer3d.processes import is_at, remove_if_abandoned

__all__ = ["RunLock", "attempts_of", "refuse_held"]

_FILE = ".lock"
_REPLACED = ("manifest.toml", "environment.json")  # are written whole, and read back as the run's own
_KINDS = MappingProxyType(
    {"checkpoints": Path.is_dir, **dict.fromkeys((_FILE, *_REPLACED, "metrics.jsonl", "error.json"), Path.is_file)}
)
_DYING_S = 10.0  # how long ranks of a launcher that was killed may take to end, with the memory they hold
_KILLED_S = 1.0  # how long a process that was sent SIGKILL may still look alive
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

log = logging.getLogger(__name__)


class RunLock:
    """An exclusive hold on a run's folder: flock on a file in it, which names the holder.

    The kernel releases it when the last process that has it ends, however it does; ranks, forked or spawned, share
    it with their launcher, so it lasts as long as one of them writes. A run that comes to its end removes the file.

    Args:
        output: The run's folder; made if it is not there.
        attempts: Where the ranks of this run leave their files, for `composer3d doctor` to find.
        takes_over: Whether the run goes on without its holder, which was lost: where it, or the disk, has not given the
            lock up, the file is replaced by another one.

    Raises:
        LockError: Another run holds it; the text names both. Or another user's link lies in it.

    Memory: none. Collectives: none.
    """

    def __init__(self, output: Path, *, attempts: Path | None = None, takes_over: bool = False) -> None:
        self._path = output / _FILE
        self._owner = os.getpid()
        output.mkdir(parents=True, exist_ok=True)
        _refuse_obstacles(output)
        self._descriptor = self._acquire(output, takes_over=takes_over)
        remove_if_abandoned(Path(str(_holder(self._path).get("attempts") or ".")))  # of a launcher that was killed
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "start": _now(), "attempts": str(attempts or "")}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, (json.dumps(holder) + "\n").encode(), 0)

    def _acquire(self, output: Path, *, takes_over: bool) -> int:
        deadline = time.monotonic() + _DYING_S
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(self._path)
                os.close(descriptor)
                if (
                    takes_over
                ):  # removing the file, once: who has it locked has lost the run, and removes none but its own
                    self._path.unlink(missing_ok=True)
                    continue
                if not _is_dead(holder) or time.monotonic() > deadline:
                    raise LockError(_refusal(output, holder)) from None
                time.sleep(0.05)
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise
                log.warning(
                    "%s: this disk has no locks (%s): a second run in this folder would not be noticed",
                    output,
                    error.strerror,
                )
            if is_at(descriptor, self._path):
                return descriptor
            os.close(descriptor)  # the run before removed the file between the two calls

    def __getstate__(self) -> dict[str, Any]:
        """Hand the descriptor to a process that is being spawned; it cannot be pickled for anybody else."""
        from multiprocessing.context import assert_spawning
        from multiprocessing.reduction import DupFd

        assert_spawning(self)
        return {**vars(self), "_descriptor": DupFd(self._descriptor)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _descriptor=state["_descriptor"].detach())
        os.set_inheritable(self._descriptor, False)  # a program that a rank starts must not keep it

    def leave_children_out(self) -> None:
        """Have processes that this one forks give the lock up: workers that outlive a killed rank must not keep it."""
        os.register_at_fork(after_in_child=self._close)

    def release(self) -> None:
        """Remove the file and give the lock up, in the process that took it."""
        if os.getpid() == self._owner and self._descriptor >= 0 and is_at(self._descriptor, self._path):
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:  # a folder that became read-only: the kernel's lock ends all the same
                log.debug("%s: not removed: %s", self._path, error)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def refuse_held(output: Path) -> None:
    """Refuse a folder that a living run of this machine holds, before anything is checked or started in it.

    Whether it is free is decided by `RunLock` alone; nothing is made or changed here.

    Raises:
        LockError: Another run holds it; the text names both.
    """
    path, deadline = output / _FILE, time.monotonic() + _KILLED_S
    while _is_held_here(path):
        if time.monotonic() > deadline:
            raise LockError(_refusal(output, _holder(path)))
        time.sleep(0.05)


def _is_held_here(path: Path) -> bool:
    holder = _holder(path)
    if holder.get("host") != socket.gethostname() or _is_dead(holder):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        log.debug("%s: %s", path, error)
    finally:
        os.close(descriptor)
    return False


def _refuse_obstacles(output: Path) -> None:
    """Refuse entries of the folder that would be written through, or that occupy the name of a file of the run."""
    for path in sorted(output.iterdir()):
        owner = path.lstat().st_uid
        if path.is_symlink() and (owner != os.getuid() or path.name == _FILE):
            raise LockError(
                f"{path}: is a symbolic link of user {owner}, and a run would write through it; remove it, and "
                f"let nobody else write to {output}"
            )
        advice = "move it away, or set another run.output"
        if path.is_symlink() and path.name in _REPLACED:
            raise LockError(f"{path}: is a symbolic link, and a run writes its own file there; {advice}")
        is_kind = _KINDS.get(path.name)
        if is_kind is not None and not is_kind(path):
            kind = "file" if is_kind is Path.is_file else "folder"
            raise LockError(f"{path}: is no {kind}, and a run keeps a {kind} of its own there; {advice}")


def attempts_of(output: Path) -> Path:
    """Return the folder in which the ranks of the run that holds a folder leave their files.

    Args:
        output: The run's folder.
    """
    return Path(_holder(output / _FILE).get("attempts") or output / "ranks")


def _refusal(output: Path, holder: Mapping[str, Any]) -> str:
    pid, host = holder.get("pid", "unknown"), holder.get("host", "unknown")
    if _is_dead(holder):
        state = f"its launcher (pid {pid} on {host}) is gone, and ranks of it have not ended yet; end them"
    else:
        state = (
            f"pid {pid} on {host}, since {holder.get('start', 'unknown')}; wait for it, or stop it: kill {pid} saves "
            "and ends it"
        )
    return (
        f"{output}: another run is in this folder: {state}. This one (pid {os.getpid()} on {socket.gethostname()}) has "
        "changed nothing; another run.output lets it start beside the other"
    )


def _holder(path: Path) -> dict[str, Any]:
    """Return the holder's entry; empty if it has not written one yet."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_dead(holder: Mapping[str, Any]) -> bool:
    """Return whether the holder was a process of this machine that has ended, or is a zombie."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    try:
        return Path(f"/proc/{holder['pid']}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return Path("/proc/self").exists()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
