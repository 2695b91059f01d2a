"""`tune`: the suggestions for a manifest measured on this machine, and the best one written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError
from composer3d.planning.tuning.halving import halve, rank_correlation
from composer3d.planning.tuning.trial import Measured, measure_in_turns, measure_steps
from composer3d.processes import join_launcher, temporary_folder

if TYPE_CHECKING:
    from composer3d.planning.suggesting.manifest_suggestions import SuggestResult

__all__ = ["Trial", "TuneResult", "tune_on_machine"]

_TIMEOUT_S = 600.0
_CALIBRATION_S = 30.0
# Of the last round: of runs that are held between their turns, and of runs that end with each.
_TURNS, _TURNS_APART = 7, 3
_LEAST_OF_TURN = 2  # steps
_ENDLESS = 10_000_000  # steps of a trial: it is ended when its own are timed, which may be more than the manifest's
# What a run writes for people, sends elsewhere, or does between steps is not wanted of a trial.
_IDLE = ("profiling", "evaluation")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One layout: as planned and as measured.

    Args:
        layout: In words.
        changes: What `--set` has to say for the manifest to become it.
        planned_s: Seconds of a step by the plan.
        measured_s: The same as measured, one figure a round, of twice as many steps as in the round before; in the last
            that of several turns.
        failure: Why it gave no figure, or none in its last round; empty where it gave one.
        num_steps: On which its last figure stands.
        is_compared: Whether it comes from turns in which another layout had its own.
    """

    layout: str
    changes: tuple[str, ...]
    planned_s: float
    measured_s: tuple[float, ...]
    failure: str = ""
    num_steps: int = 0
    is_compared: bool = False


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """Answer of `tune`.

    Args:
        trials: By time as measured, the best first; those that failed last.
        correction: Measured over planned time, the geometric mean of all trials: what a plan on this machine is off by.
        tau: Kendall's rank correlation of planned and measured times; None where there is nothing to order.
        hardware: Name of what was planned for.
        manifest: File of the given manifest.
        overrides: With which it was given.
    """

    trials: tuple[Trial, ...]
    correction: float | None
    tau: float | None
    hardware: str
    manifest: str
    overrides: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a layout was measured."""
        return bool(self.trials) and bool(self.trials[0].measured_s)

    @property
    def best(self) -> Trial:
        """The fastest as measured."""
        return self.trials[0]

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d tune --json` prints."""
        return {
            "hardware": self.hardware,
            "correction": self.correction,
            "tau": self.tau,
            "trials": [
                {
                    "layout": trial.layout,
                    "set": list(trial.changes),
                    "planned_s": trial.planned_s,
                    "measured_s": list(trial.measured_s),
                    "failure": trial.failure,
                    "steps": trial.num_steps,
                    "compared": trial.is_compared,
                }
                for trial in self.trials
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the table of planned and measured times, and what follows from it."""
        yield f"{'planned':>10} {'measured':>10} {'rounds':>6}  layout"
        for trial in self.trials:
            measured = f"{trial.measured_s[-1]:.3g} s" if trial.measured_s else "failed"
            yield f"{trial.planned_s:>8.3g} s {measured:>10} {len(trial.measured_s):>6}  {trial.layout}"
            if trial.failure:
                rest = f"; the time is that of {trial.num_steps} steps before" if trial.measured_s else ""
                yield f"{'':>29}  {trial.failure}{rest}"
        if self.ok and not self.best.is_compared and len([trial for trial in self.trials if trial.measured_s]) > 1:
            yield f"the last comparison, in turns, has failed: the choice stands on {self.best.num_steps} steps"
        if self.correction is not None:
            order = "" if self.tau is None else f"; order of planned and measured times: tau {self.tau:+.2f}"
            yield f"measured times are {self.correction:.3g} of those planned on {self.hardware}{order}"

    def write(self, path: Path) -> None:
        """Write the best layout as a manifest that extends the given one and states what overrides it.

        The table stands above as comments.

        Args:
            path: Of the new manifest; not there.

        Raises:
            ComposerError: It cannot be written, or is there.
        """
        from composer3d.manifest import read
        from composer3d.planning.suggesting.patch_file import extended_by, patch_text

        known, moved = extended_by(read(self.manifest, self.overrides), path.parent)
        comments = "".join(f"# {line}\n" for line in self._lines())
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(comments + patch_text(known, [*moved, *self.best.changes], overrides=self.overrides))
        except OSError as error:
            raise ComposerError(f"{path}: cannot be written: {error.strerror}") from error


def tune_on_machine(
    manifest: str | Path,
    *,
    num_ranks: int,
    hardware: str | None = None,
    memory_bytes: int | None = None,
    keep: Sequence[str] = (),
    overrides: Sequence[str] = (),
    num_steps: int = 4,
    report: Callable[[str], None] = lambda line: None,
) -> TuneResult:
    """Measure what is suggested for a manifest, by successive halving, the last two in turns.

    Each trial is a run of the manifest's own model and data, in a folder that is removed; it is ended when its steps
    are timed. Plugins of profiling, evaluation and checkpoints are left out.

    Args:
        manifest: Path, or the name of a shipped manifest.
        num_ranks: Of this machine.
        hardware: A shipped cluster's name, or its file; None measures this machine for half a minute.
        memory_bytes: Of a device; default: what the cluster's has.
        keep: Pinned choices, as for `suggest`; the precision is kept unless it is among them, since another one is
            another run.
        overrides: `table.key=value`, as given to `--set`.
        num_steps: Steps that are timed in the first round; each further round times twice as many.
        report: Called with a line for every trial.

    Raises:
        ComposerError: Nothing fits, or a launcher has started this process: trials start ranks of their own.
    """
    from composer3d import suggest

    if join_launcher() is not None:
        raise ComposerError(
            "tune starts the ranks of every trial itself, on one machine, and a launcher has started this process; "
            "on several machines, `suggest --write FOLDER` and a launch of each"
        )
    with temporary_folder("tune") as work:
        if hardware is None:
            report(f"measuring this machine for {_CALIBRATION_S:.0f} s")
            hardware = _measured_machine(work, num_ranks)
        found = suggest(
            manifest,
            world_size=num_ranks,
            hardware=hardware,
            memory_bytes=memory_bytes,
            keep=keep if any(pin.startswith("precision") for pin in keep) else [*keep, "precision"],
            overrides=overrides,
        )
        if not found.ok:
            raise ComposerError(str(found))
        return _tuned(found, overrides, work, num_ranks=num_ranks, num_steps=num_steps, report=report)


def _measured_machine(folder: Path, num_ranks: int) -> str:
    """Measure this machine; return the file."""
    from composer3d.manifest import dump
    from composer3d.planning.hardware import measure_machine

    tables = measure_machine(seconds=_CALIBRATION_S, num_ranks=num_ranks)
    assert tables is not None, "no launcher has started this process"
    (folder / "this_machine.toml").write_text(dump(tables), encoding="utf-8")
    return str(folder / "this_machine.toml")


def _tuned(
    found: SuggestResult,
    overrides: Sequence[str],
    folder: Path,
    *,
    num_ranks: int,
    num_steps: int,
    report: Callable[[str], None],
) -> TuneResult:
    from composer3d.checking import device_of

    tuner = _Tuner(found, overrides, folder, num_ranks=num_ranks, report=report)
    rows = tuner.rows
    # A device's memory has room for one run.
    in_turns = tuner.measure_together if device_of(found.manifest).type == "cpu" else tuner.measure_apart
    times = halve(range(len(rows)), tuner.measure, in_turns, num_steps=num_steps)
    trials = [
        Trial(
            layout=row["layout"],
            changes=found.patches[index],
            planned_s=row["time"]["step_s"]["value"],
            measured_s=tuple(times[index]),
            failure=tuner.failures.get(index, ""),
            num_steps=tuner.num_steps.get(index, 0),
            is_compared=index in tuner.compared,
        )
        for index, row in enumerate(rows)
    ]
    # Who came further was faster in every round that both took part in.
    trials.sort(key=lambda trial: (-len(trial.measured_s), trial.measured_s[-1:] or (math.inf,)))
    timed = [trial for trial in trials if trial.measured_s]
    off = [math.log(trial.measured_s[0] / trial.planned_s) for trial in timed]
    return TuneResult(
        trials=tuple(trials),
        correction=math.exp(math.fsum(off) / len(off)) if off else None,
        tau=rank_correlation([trial.planned_s for trial in timed], [trial.measured_s[0] for trial in timed]),
        hardware=found.hardware_name,
        manifest=tuner.source,
        overrides=tuple(overrides),
    )


class _Tuner:
    """Measures what was suggested, by its number.

    Args:
        found: Of `suggest`.
        overrides: As given to `tune_on_machine`.
        folder: Of the trials.
        num_ranks: As given to `tune_on_machine`.
        report: Called with a line for every trial.
    """

    def __init__(
        self,
        found: SuggestResult,
        overrides: Sequence[str],
        folder: Path,
        *,
        num_ranks: int,
        report: Callable[[str], None],
    ) -> None:
        document = found.manifest.document
        self.rows: list[dict[str, Any]] = found.to_json()["suggestions"]
        self.source, self.failures = document.file, dict[int, str]()
        self.num_steps, self.compared = dict[int, int](), set[int]()
        self._folder, self._num_ranks, self._report = folder, num_ranks, report
        self._numbers = count()
        quiet = ["checkpoint.final=false", *(f"{name}=false" for name in _IDLE if name in document.tables)]
        quiet.append(f"train.steps={max(_ENDLESS, found.manifest.tables['train'].steps)}")
        self._changes = [[*overrides, *patch, *quiet] for patch in found.patches]

    def measure(self, index: int, steps: int) -> float | None:
        """Return the median seconds of so many steps of one of them."""
        place = self._folder / f"trial-{next(self._numbers)}"
        place.mkdir()
        measured = measure_steps(
            self.source,
            self._changes[index],
            num_ranks=self._num_ranks,
            num_steps=steps,
            folder=place,
            timeout_s=_TIMEOUT_S,
        )
        return self._note(index, measured)

    def measure_together(self, indices: Sequence[int], steps: int) -> dict[int, list[float]]:
        """Return the seconds of several by turn, whose runs are held between their turns."""
        each = max(_LEAST_OF_TURN, steps // 2)
        turns = measure_in_turns(
            self.source,
            {index: self._changes[index] for index in indices},
            num_ranks=self._num_ranks,
            num_steps=each,
            num_turns=_TURNS,
            folder=self._folder / "turns",
            timeout_s=_TIMEOUT_S,
        )
        for index, times in turns.items():
            if isinstance(times, Measured):
                self._note(index, times)
            else:
                self._note(index, Measured(step_s=statistics.median(times), num_steps=each * _TURNS))
        found = {index: times for index, times in turns.items() if not isinstance(times, Measured)}
        return self._compared(found, each * _TURNS)

    def measure_apart(self, indices: Sequence[int], steps: int) -> dict[int, list[float]]:
        """Return the same of runs that end with each turn; every other turn is in the opposite order."""
        turns: dict[int, list[float]] = {index: [] for index in indices}
        for turn in range(_TURNS_APART):
            for index in list(turns) if turn % 2 == 0 else list(reversed(turns)):
                seconds = self.measure(index, steps)
                if seconds is None:
                    del turns[index]
                else:
                    turns[index].append(seconds)
        return self._compared(turns, steps * _TURNS_APART)

    def _compared(self, turns: dict[int, list[float]], steps: int) -> dict[int, list[float]]:
        self.num_steps |= dict.fromkeys(turns, steps)
        if len(turns) > 1:
            self.compared |= turns.keys()
        return turns

    def _note(self, index: int, measured: Measured) -> float | None:
        steps = measured.num_steps
        told = measured.failure if measured.step_s is None else f"{measured.step_s:.3g} s a step over {steps} steps"
        self._report(f"{self.rows[index]['layout']}: {told}")
        if measured.step_s is None:
            self.failures[index] = measured.failure
        else:
            self.num_steps[index] = steps
        return measured.step_s
