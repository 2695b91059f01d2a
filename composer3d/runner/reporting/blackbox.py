"""Black box of every rank: a file of its last actions, written on request, when a rank failed, and at the end."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from composer3d.manifest import redacted
from composer3d.processes import write_private
from composer3d.runner.reporting.progress import attempt_folder

if TYPE_CHECKING:
    from composer3d import RunContext

__all__ = ["REPORT_REQUEST", "BlackBox", "accounts_folder"]

REPORT_REQUEST = "asked"  # a file in the attempt's folder: ranks report their state when it changes
_LOOK_S = 0.3
_KEPT = 400  # collectives of each group in a rank's report


def accounts_folder(output: Path) -> Path:
    """Return the folder of the ranks' reports, `rank-R.json`.

    Args:
        output: The run's folder.
    """
    return output / "accounts"


class BlackBox:
    """Writes this rank's state into the run's folder: when it fails, when another fails, on request, and at the end.

    A thread watches for failures of others and for requests, so a rank that hangs reports as long as what it hangs in
    frees the interpreter; a killed one is reported by the others.

    Args:
        context: Of the composition, with its mesh and recorders.
        output: The run's folder.

    Memory: none. Collectives: none.
    """

    def __init__(self, context: RunContext, output: Path) -> None:
        self._context, self._attempt = context, attempt_folder(output)
        self._path = accounts_folder(output) / f"rank-{context.rank}.json"
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="composer3d-blackbox", daemon=True)

    def __enter__(self) -> BlackBox:
        self._path.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._write("ended" if error is None else "failed", error)

    def _watch(self) -> None:
        asked = 0
        while not self._stop.wait(_LOOK_S):
            now = self._last_asked()
            if now > asked:
                asked = now
                self._write("running", None)

    def _last_asked(self) -> int:
        """Return the time in ns of the newest request or failure, both files of the attempt; 0 for none."""
        try:
            with os.scandir(self._attempt) as files:
                times = [file.stat().st_mtime_ns for file in files if _is_question(file.name)]
        except OSError:  # the parent has cleared it away
            return 0
        return max(times, default=0)

    def _write(self, state: Literal["running", "failed", "ended"], error: BaseException | None) -> None:
        context, flight = self._context, self._context.flight
        content: dict[str, Any] = {
            "composer3d": 1,
            "attempt": self._attempt.name,
            "rank": context.rank,
            "world_size": context.world_size,
            "who": context.layout.who(context.rank),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "state": state,
            "error": None if error is None else redacted(f"{type(error).__name__}: {error}"),
            "device": context.device.type,
            "memory": _memory(context.device),
            **(flight.leave(error, kept=_KEPT) if flight is not None else {}),
        }
        with self._lock:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
                write_private(beside, json.dumps(content) + "\n")
                os.replace(beside, self._path)
            except OSError:  # a full disk may be the failure itself, which ranks that can still write report
                return


def _is_question(name: str) -> bool:
    return name == REPORT_REQUEST or (name.startswith("rank-") and name.endswith(".json"))


def _memory(device: Any) -> dict[str, int]:
    """Return this rank's bytes: resident now, at most, and on the device."""
    import resource

    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    result = {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if device.type == "cuda":
        result["device_bytes"] = torch.cuda.memory_allocated(device)
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return result
