"""A few real steps of a manifest, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from composer3d.processes import die_with, remove_if_abandoned
from composer3d.runner import attempts_of

__all__ = ["Measured", "measure_in_turns", "measure_steps"]

# The first steps compile, allocate and meet their peers for the first time.
_NUM_UNTIMED = 2
_POLL_S = 0.05
_DYING_S = 10.0  # how long killed ranks may hold what they left
_COUNT = re.compile(r"[0-9]+ (problems?|warnings?).*")  # the line below problems


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of a trial.

    Args:
        step_s: Median seconds of a step; None where it failed.
        num_steps: Of which it is the median.
        failure: The error that it reported, or the last line that it printed; empty where it did not fail.
    """

    step_s: float | None
    num_steps: int = 0
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
        The median of the steps that were timed, which are fewer where the time was over.
    """
    with _Run(manifest, overrides, num_ranks=num_ranks, folder=folder) as run:
        run.wait_for(num_steps + _NUM_UNTIMED, timeout_s)
        has_failed = run.is_over
    times = run.times()[_NUM_UNTIMED:][:num_steps]
    if not times or (has_failed and len(times) < num_steps):
        return Measured(step_s=None, failure=run.failure(timeout_s))
    return Measured(step_s=statistics.median(times), num_steps=len(times))


def measure_in_turns(
    manifest: str,
    layouts: Mapping[int, Sequence[str]],
    *,
    num_ranks: int,
    num_steps: int,
    num_turns: int,
    folder: Path,
    timeout_s: float,
) -> dict[int, list[float] | Measured]:
    """Run several layouts of a manifest for some steps each, in turns; all but one are held meanwhile.

    Every other turn is in the opposite order. A step in which a run was held is not timed.

    Args:
        manifest: Path, or the name of a shipped manifest.
        layouts: By number, as given to `--set`.
        num_ranks: To start on this machine for every layout.
        num_steps: To time in each turn.
        num_turns: Of every layout.
        folder: Of the runs' folders.
        timeout_s: For one turn, the start included.

    Returns:
        Median seconds of a step by turn; of one that failed, why.

    Memory: that of all runs at once, so that only a CPU's memory is likely to have room for them.
    """
    found: dict[int, list[float] | Measured] = {}
    with contextlib.ExitStack() as stack:
        runs: dict[int, _Run] = {}
        for number, overrides in layouts.items():
            own = folder / str(number)
            own.mkdir(parents=True)
            run = runs[number] = stack.enter_context(_Run(manifest, overrides, num_ranks=num_ranks, folder=own))
            run.wait_for(_NUM_UNTIMED, timeout_s)
            run.hold()
        turns: dict[int, list[float]] = {number: [] for number in runs}
        for turn in range(num_turns):
            for number in list(turns) if turn % 2 == 0 else list(reversed(turns)):
                run = runs[number]
                begin = len(run.times()) + 1
                run.go_on()
                run.wait_for(begin + num_steps, timeout_s)
                run.hold()
                times = run.times()[begin : begin + num_steps]
                if len(times) < num_steps:
                    del turns[number]
                    found[number] = Measured(step_s=None, failure=run.failure(timeout_s))
                else:
                    turns[number].append(statistics.median(times))
    return {**found, **turns}


class _Run:
    """A run of a manifest in processes of its own, which end with the block that it is used in.

    Args:
        manifest: As for `measure_steps`.
        overrides: As for `measure_steps`.
        num_ranks: As for `measure_steps`.
        folder: As for `measure_steps`.
    """

    def __init__(self, manifest: str, overrides: Sequence[str], *, num_ranks: int, folder: Path) -> None:
        self._folder, self._printed = folder, folder.with_suffix(".log")
        command = [sys.executable, "-m", "composer3d", "run", manifest, "--resume", "never"]
        command += ["--nproc-per-node", str(num_ranks)]
        for override in (*overrides, f"run.output={json.dumps(str(folder))}"):
            command += ["--set", override]
        with self._printed.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),  # whatever ends this process, the trial ends with it
            )

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *raised: object) -> None:
        _end(self._process)
        _remove_files_of_ranks(self._folder)

    @property
    def is_over(self) -> bool:
        """Whether it came to an end by itself."""
        return self._process.poll() is not None

    def wait_for(self, num_steps: int, timeout_s: float) -> None:
        """Wait until so many steps are done, the run is over, or the time is."""
        until = time.monotonic() + timeout_s
        while self._process.poll() is None and len(self.times()) < num_steps and time.monotonic() < until:
            time.sleep(_POLL_S)

    def hold(self) -> None:
        """Hold all its processes where they are."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them go on."""
        self._send(signal.SIGCONT)

    def _send(self, what: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, what)

    def times(self) -> list[float]:
        """Return the seconds of the steps that are done."""
        return _times(self._folder)

    def failure(self, timeout_s: float) -> str:
        """Return why it timed nothing, or less than was asked."""
        if self._process.returncode == 0:
            return f"it was over after {len(self.times())} steps, before all were timed: {_last_line(self._printed)}"
        return _reported(self._folder) or _last_line(self._printed) or f"no step was timed within {timeout_s:.0f} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher with its ranks, which are of its process group or die with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove_files_of_ranks(output: Path) -> None:
    """Remove what the ranks of a run that was ended have left; nobody will ask why it was killed."""
    place, until = attempts_of(output), time.monotonic() + _DYING_S
    remove_if_abandoned(place)
    while place.is_dir() and not place.is_relative_to(output) and time.monotonic() < until:
        time.sleep(_POLL_S)
        remove_if_abandoned(place)


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
