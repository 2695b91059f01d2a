"""A few real steps of a manifest, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from composer3d.processes import die_with

__all__ = ["Measured", "measure_steps"]

# The first steps compile, allocate and meet their peers for the first time.
_NUM_UNTIMED = 2
_POLL_S = 0.05
_COUNT = re.compile(r"[0-9]+ (problems?|warnings?).*")  # the line below problems


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of a trial.

    Args:
        step_s: Median seconds of a step; None where it failed.
        failure: The error that it reported, or the last line that it printed; empty where it did not fail.
    """

    step_s: float | None
    failure: str = ""


def measure_steps(
    manifest: str, overrides: Sequence[str], *, num_ranks: int, num_steps: int, folder: Path, timeout_s: float
) -> Measured:
    """Run a manifest for some steps, and end it.

    Args:
        manifest: Path, or the name of a shipped manifest.
        overrides: As given to `--set`.
        num_ranks: To start on this machine.
        num_steps: To time, after the first two.
        folder: Made for the run, and empty.
        timeout_s: For all of it.

    Returns:
        The median of the steps that were timed.
    """
    command = [sys.executable, "-m", "composer3d", "run", manifest, "--resume", "never"]
    command += ["--nproc-per-node", str(num_ranks)]
    for override in (*overrides, f"run.output={json.dumps(str(folder))}"):
        command += ["--set", override]
    printed = folder.with_suffix(".log")
    with printed.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # whatever ends this process, the trial ends with it
        )
        try:
            wanted, until = num_steps + _NUM_UNTIMED, time.monotonic() + timeout_s
            while process.poll() is None and len(_times(folder)) < wanted and time.monotonic() < until:
                time.sleep(_POLL_S)
        finally:
            _end(process)
    times = _times(folder)[_NUM_UNTIMED:]
    if times:
        return Measured(step_s=statistics.median(times[:num_steps]))
    failure = _reported(folder) or _last_line(printed) or f"no step was timed within {timeout_s:.0f} s"
    return Measured(step_s=None, failure=failure)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher with its ranks, which are of its process group or die with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _times(folder: Path) -> list[float]:
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in lines]
    return [row["step_time_s"] for row in rows if "step_time_s" in row]


def _reported(folder: Path) -> str:
    """Return the error of the run's report, whose folder is removed; empty where it left none."""
    try:
        report = json.loads((folder / "error.json").read_text(encoding="utf-8"))
        return f"{report['error']}: {report['message'].strip().splitlines()[0]}"
    except (OSError, ValueError, KeyError, IndexError, AttributeError, TypeError):
        return ""


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    problems = [line for line in lines if not _COUNT.fullmatch(line)]
    return problems[-1].strip() if problems else ""
