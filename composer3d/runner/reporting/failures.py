"""Failure report of a run: the rank that failed first, its traceback, and the ranks that failed because of it."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import time
import traceback as tracebacks
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from composer3d.errors import CheckpointError, ComposerError, HookError, ManifestError, ReplicaError
from composer3d.manifest import redacted
from composer3d.observation import lost_a_peer
from composer3d.processes import machine_error, write_private
from composer3d.runner.reporting.progress import LastSeen, left_reason

__all__ = ["Ending", "FailureKind", "FailureReport", "read_failures", "root_cause", "wrong_manifest"]

FailureKind = Literal["user", "machine", "crash", "killed", "left", "stuck", "interrupted", "parted"]

_SHORT = 10_000  # characters of a message, and of a traceback

_LAUNCHER_FILES = (
    "/composer3d/runner/launching/rank.py",
    "/composer3d/runner/launching/launcher.py",
    "/torch/distributed/elastic/",
    "/torch/multiprocessing/",
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Ending of a rank's process, as its parent saw it.

    Args:
        rank: Of the world, from 0.
        exit_code: As in `subprocess`: negative for a signal; None where only the parent of all knows (torchrun).
        time_ns: When it was seen, `time.time_ns`.
    """

    rank: int
    exit_code: int | None
    time_ns: int


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Why a rank failed, and with it the run.

    Args:
        rank: The rank; None where no rank is to blame (Ctrl-C).
        world_size: Ranks there were.
        host: Where it ran.
        pid: Of the rank's process, on `host`.
        time_ns: Time of the failure, ns since 1970.
        kind: `user` is a ComposerError, shown without a traceback and never restarted; so is `machine`, a full disk, a
            folder that is gone or read-only, or too few open files; `crash` any other exception, a plugin's included;
            `killed` a signal; `left` a process that ended, or a function that returned, before the others; `stuck`
            ranks that did not end in the time they had; `interrupted` Ctrl-C.
        error: The exception's class; empty without one.
        message: The exception's text, or what happened.
        traceback: The exception's traceback, without the launcher's frames; empty without one.
        step: The step the rank was in, None before the first.
        phase: What it did there, see `RunPhase`.
        exit_code: The exit code, negative for a signal; None if not known.
        consequence: It only lost a rank that had failed before.
        witness: What the ranks that lost this one saw of it; only after an abort, which torch ends a rank with where
            collectives do not fit.
        advice: What to do about it, where that is known.
        is_recorded: Whether it is to stand in the run's `error.json`.
        others: What became of the other ranks that failed.
    """

    rank: int | None
    world_size: int
    host: str
    pid: int
    time_ns: int
    kind: FailureKind
    error: str = ""
    message: str = ""
    traceback: str = ""
    step: int | None = None
    phase: str | None = None
    exit_code: int | None = None
    consequence: bool = False
    witness: str = ""
    advice: str = ""
    is_recorded: bool = True
    others: tuple[FailureReport, ...] = ()

    @classmethod
    def from_exception(
        cls, error: BaseException, *, rank: int, world_size: int, folder: Path, output: Path | None = None
    ) -> FailureReport:
        """Describe the exception that ended this rank.

        Args:
            error: The exception, with its traceback.
            rank: Global rank on which it was raised.
            world_size: Ranks there are.
            folder: The attempt's folder, where this rank's progress is.
            output: The run's folder.
        """
        seen = LastSeen.read(folder, rank)
        machine = machine_error(error, output)
        user = isinstance(error, ComposerError) and not isinstance(error, (HookError, ReplicaError))
        left = isinstance(error, SystemExit) and error.code in (0, None)
        text = str(error if machine is None else machine)
        if isinstance(error, SystemExit):
            text = "left early with exit code 0" if left else f"called sys.exit({error.code!r})"
        return cls(
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            time_ns=time.time_ns(),
            kind="machine" if machine else "user" if user else "left" if left else "crash",
            error=type(error).__name__,
            message=redacted(text),
            traceback="" if user or machine else redacted(_format(error)),
            step=seen.step if seen else None,
            phase=seen.phase.name.lower() if seen else None,
            exit_code=2 if isinstance(error, ManifestError) else 3,
            consequence=machine is None and lost_a_peer(error),
            advice=machine.advice if machine else "",
        )

    @classmethod
    def of_launcher(cls, error: BaseException, *, world_size: int) -> FailureReport:
        """Describe an exception of the launcher's own, given the number of ranks, none of which is to blame."""
        here: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "time_ns": time.time_ns()}
        name, told = type(error).__name__, redacted("".join(tracebacks.format_exception(error)))
        message = redacted(f"the launcher raised {name}: {error}")
        return cls(rank=None, world_size=world_size, kind="crash", error=name, message=message, traceback=told, **here)

    @classmethod
    def from_ending(cls, ending: Ending, *, world_size: int, folder: Path) -> FailureReport:
        """Describe a rank that ended without an exception of its own.

        Args:
            ending: How it ended.
            world_size: Ranks there are.
            folder: The attempt's folder.
        """
        seen = LastSeen.read(folder, ending.rank)
        code = ending.exit_code
        if code is None:
            kind, message = "killed", "ended without a word (it was killed, or left by os._exit)"
        elif code < 0:
            kind, message = "killed", f"was killed by {_signal_name(-code)}{_place_of(folder, ending.rank)}"
        elif code == 0:
            kind, message = "left", "left early with exit code 0"
        else:
            kind, message = "left", f"ended with exit code {code} and no exception"
        return cls(
            rank=ending.rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=seen.pid if seen else 0,
            time_ns=ending.time_ns,
            kind=kind,  # type: ignore[arg-type]  # one of the words above
            message=message,
            step=seen.step if seen else None,
            phase=seen.phase.name.lower() if seen else None,
            exit_code=code,
        )

    def write(self, folder: Path) -> None:
        """Put this rank's report into the attempt's folder, whole or not at all."""
        _write_json(folder / f"rank-{self.rank}.json", asdict(self))

    def to_text(self) -> str:
        """Return this rank's report as JSON, shortened to what `Progress.leave` has room for."""
        return json.dumps(asdict(replace(self, message=self.message[:_SHORT], traceback=self.traceback[-_SHORT:])))

    def render(self, output: Path | None = None) -> str:
        """Return the one block that the user reads.

        Args:
            output: The run's output folder; with it the last line says where the details and the newest checkpoint are.
        """
        lines = [self._headline()]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.witness:
            lines.append(self.witness)
        lines += self._rest()
        if self.advice:
            lines.append(f"try: {self.advice}")
        if output is not None and not wrong_manifest(self) and self.kind != "parted":
            lines.append(self._where(output))
        return "\n".join(lines) + "\n"

    def write_error_json(self, output: Path) -> Path:
        """Write `error.json` into the run's folder, if that takes it, and return its path.

        Args:
            output: The run's output folder.
        """
        path = output / "error.json"
        try:
            _write_json(path, {"composer3d": 1} | asdict(self))
        except OSError as error:  # it may be what the report is about, which says so
            log.debug("%s: %s", path, error)
        return path

    def who(self) -> str:
        """Return `rank 1 of 2 (host, pid 123)`."""
        if self.rank is None:
            return "the ranks"
        return f"rank {self.rank} of {self.world_size} ({self.host}, pid {self.pid})"

    def _headline(self) -> str:
        if wrong_manifest(self):
            return self.message
        if self.rank is None:
            return self.message if self.kind in ("interrupted", "parted") else f"run failed: {self.message}"
        if self.kind in ("user", "machine"):
            alone = self.world_size > 1 and len(self._same()) + 1 < self.world_size
            return f"run failed: {self.message}" + (f" ({self._place(self.who())})" if alone else "")
        if self.error and self.error != "SystemExit":
            text = self.message.partition("\n")[0]
            return f"run failed: {self._place(f'{self.who()} raised {self.error}')}" + (f": {text}" if text else "")
        return f"run failed: {self._place(f'{self.who()} {self.message}')}"

    def _place(self, text: str) -> str:
        if self.step is not None:
            text += f" at step {self.step}"
        elif self.phase is not None:
            text += " before its first step"
        return text + (f" while {self.phase}" if self.phase in ("loading", "evaluating", "saving", "closing") else "")

    def _where(self, output: Path) -> str:
        """Return where details are, and which checkpoint the next run goes on from."""
        from composer3d.checkpoint import latest, other_than

        try:
            checkpoint = latest(output / "checkpoints")
            kept = f"the newest complete checkpoint is {checkpoint}" if checkpoint else "no checkpoint was complete"
        except CheckpointError as error:
            checkpoint, kept = None, str(error)
        is_refused = checkpoint is not None and self.error == "CheckpointError" and str(checkpoint) in self.message
        if checkpoint is not None and is_refused and f"{checkpoint}: of another run" not in self.message:
            newest = other_than(checkpoint)
            kept = f"{checkpoint} is the newest checkpoint, and " + (
                f"the one before it is {newest}: --resume {newest} goes on from there" if newest else "the only one"
            )
        if not self.is_recorded:
            return kept
        details = output / "error.json"
        return f"details: {details}; {kept}" if details.exists() else f"{details} could not be written; {kept}"

    def _same(self) -> list[FailureReport]:
        return [other for other in self.others if (other.error, other.message) == (self.error, self.message)]

    def _rest(self) -> list[str]:
        """Return one line for the ranks that failed alike and one for those that failed because of them."""
        same = self._same()
        lines = []
        if same and self.kind not in ("user", "machine"):
            lines.append("likewise: " + ", ".join(f"rank {other.rank}" for other in same))
        rest = [f"rank {other.rank} ({_short(other)})" for other in self.others if other not in same]
        return lines + (["also ended: " + ", ".join(rest)] if rest else [])


def root_cause(folder: Path, endings: Sequence[Ending], *, world_size: int) -> FailureReport | None:
    """Find the rank that failed first; the others are its `others`.

    A rank that lost its connection is not the cause while another was killed, left early or raised something of its
    own. If all lost theirs, a rank whose function had already returned left them; else the earliest it is.

    Args:
        folder: The attempt's folder with the ranks' own reports.
        endings: How processes ended that the launcher did not end itself.
        world_size: Ranks there were.

    Returns:
        The report, or None if nothing failed.
    """
    told = read_failures(folder, world_size)
    silent = {
        ending.rank: FailureReport.from_ending(ending, world_size=world_size, folder=folder)
        for ending in endings
        if ending.rank not in told
    }
    failures = sorted((told | silent).values(), key=lambda failure: failure.time_ns)
    if not failures:
        return None
    causes = [failure for failure in failures if not failure.consequence]
    if not causes:
        causes = _early_returns(folder, told, world_size) or failures
    others = tuple(failure for failure in failures if failure.rank != causes[0].rank)
    # An abort of torch's may end as a fault of the thread that still runs.
    aborted = causes[0].exit_code in (-signal.SIGABRT, -signal.SIGSEGV)
    witness = next((other.message for other in others if aborted and other.kind == "user" and other.consequence), "")
    return replace(causes[0], others=others, witness=witness)


def read_failures(folder: Path, world_size: int) -> dict[int, FailureReport]:
    """Return what the ranks of an attempt reported themselves.

    Args:
        folder: The attempt's folder.
        world_size: Ranks there are.
    """
    failures = {}
    for rank in range(world_size):
        try:
            content: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
        except FileNotFoundError:
            text = left_reason(folder, rank)
            if not text:
                continue
            content = json.loads(text)
        failures[rank] = FailureReport(**content | {"others": ()})
    return failures


def wrong_manifest(report: FailureReport) -> bool:
    """Return whether the manifest or the command line is to be mended: exit code 2, and nothing to look up."""
    return report.kind == "user" and report.exit_code == 2


def _early_returns(folder: Path, told: Mapping[int, FailureReport], world_size: int) -> list[FailureReport]:
    """Return the ranks whose function returned while the others still needed them, the first one first."""
    markers = [(rank, folder / f"rank-{rank}.finished") for rank in range(world_size) if rank not in told]
    early = []
    for rank, marker in markers:
        if marker.exists():
            ending = Ending(rank=rank, exit_code=0, time_ns=marker.stat().st_mtime_ns)
            report = FailureReport.from_ending(ending, world_size=world_size, folder=folder)
            early.append(replace(report, message="returned before the others"))
    return sorted(early, key=lambda report: report.time_ns)


def _format(error: BaseException) -> str:
    """Return the traceback as text, without the leading frames of the launcher."""
    shown = tracebacks.TracebackException.from_exception(error)
    frames = list(shown.stack)
    while frames and any(part in frames[0].filename for part in _LAUNCHER_FILES):
        del frames[0]
    shown.stack = tracebacks.StackSummary.from_list(frames)
    return "".join(shown.format())


def _place_of(folder: Path, rank: int) -> str:
    """Return where a rank was that ended by a fault: the innermost line outside torch of the stack that it left."""
    try:
        text = (folder / f"rank-{rank}.stack").read_text()
    except FileNotFoundError:
        return ""
    # Threads of the backend come first, the main thread last.
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', text.rpartition("hread 0x")[2])
    outside = [frame for frame in frames if not any(part in frame[0] for part in ("/torch/", *_LAUNCHER_FILES))]
    loop = [frame for frame in outside if Path(frame[0]).parent.name != "composer3d"]
    return "".join(f" in {name} ({Path(file).name}:{line})" for file, line, name in (loop or outside)[:1])


def _short(other: FailureReport) -> str:
    if other.consequence:
        return "connection lost"
    if other.kind == "machine":
        return other.message.partition(" (")[0]
    return f"{other.error}: {other.message.partition(chr(10))[0]}" if other.error else other.message


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_private(beside, json.dumps(content, indent=1) + "\n")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
