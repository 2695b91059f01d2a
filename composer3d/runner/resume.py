"""Resuming: the checkpoint that a run starts from, and the settings that must not have changed since."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import broadcast_json, checkpoint
from composer3d.errors import CheckpointError
from composer3d.runner.objective.lr_schedule import multiplier_of
from composer3d.runner.reporting.progress import attempt_before

if TYPE_CHECKING:
    from composer3d import Composition
    from composer3d.runner.data.data_source import Source
    from composer3d.runner.data.stream import StreamSource
    from composer3d.runner.model_factory import ModelFactory
    from composer3d.runner.objective.batch_size import BatchSize
    from composer3d.runner.objective.lr_schedule_table import LRScheduleTable

__all__ = ["Origin", "RunState", "choose_checkpoint", "clear_for", "record_of", "refuse_changes", "schedule_change"]

MAX_SHOWN = 4


class RunState:
    """Progress of a run, with what its steps depend on; saved with every checkpoint.

    Args:
        record: Record that a checkpoint must agree with: model, optimizer, data.
        batch_size: Of every step.
        planned_steps: Of the whole run; learning rates depend on it.
    """

    def __init__(self, record: Mapping[str, Any], batch_size: BatchSize, *, planned_steps: int) -> None:
        # As JSON gives it back, so that a loaded record compares equal.
        self.record = json.loads(json.dumps(record, default=str))
        self._batch_size = batch_size
        self.planned_steps = planned_steps
        self.num_steps = 0
        self.num_tokens = 0

    def state_dict(self) -> dict[str, Any]:
        """Return steps, sequences and tokens done, and the record."""
        return {
            "steps": self.num_steps,
            "sequences": self._batch_size.position_of(self.num_steps),
            "tokens": self.num_tokens,
            "record": self.record,
            "planned_steps": self.planned_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; `refuse_changes` has compared the record."""
        self.num_steps, self.num_tokens = int(state["steps"]), int(state["tokens"])


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint that a run goes on from, as the first rank has read it.

    Args:
        path: Of the checkpoint.
        run: State of the run that wrote it, see `RunState`.
        is_imported: Whether another system wrote it.
    """

    path: Path
    run: Mapping[str, Any]
    is_imported: bool

    @property
    def num_steps(self) -> int:
        """Optimizer steps that it has done."""
        return int(self.run["steps"])


def choose_checkpoint(run: Composition, output: Path, how: str) -> Origin | None:
    """Return the checkpoint to start from, the same on all ranks; None starts at step 0.

    Args:
        run: Composed; rank 0 looks and reads, and all ranks agree.
        output: The run's folder.
        how: `auto` takes the newest complete one of the run's own, `never` none, anything else is a path: a checkpoint,
            or the folder of a run.

    Raises:
        CheckpointError: There is no complete checkpoint at the path, the newest is damaged or cannot be read, or it was
            not written by a run; on all ranks.

    Collectives: one broadcast of what was found.
    """
    # One rank looks: on a network disk, others may not see yet what was just written, or see what was there before.
    found, problem = broadcast_json(_searched(output, how) if run.context.rank == 0 else None)
    if problem is not None:
        raise CheckpointError(problem)
    if how not in ("auto", "never") and found is None:
        raise CheckpointError(
            f"--resume {how}: there is no complete checkpoint here; give a checkpoint or a run's folder"
        )
    return None if found is None else Origin(**found | {"path": Path(found["path"])})


def _searched(output: Path, how: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return the fields of an `Origin`, None where there is none, or the reason why none can be told."""
    try:
        path = _find(output, how)
        if path is None:
            return None, None
        state = checkpoint.read_state(path)
        saved = checkpoint.validated_run(path, state)
        if saved is None:
            raise CheckpointError(f"{path}: was not written by `composer3d run`, so there is no run to go on with")
        return {"path": str(path), "run": saved, "is_imported": bool(state.get("imported"))}, None
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{output if how == 'auto' else how}: cannot be read ({type(error).__name__}: {error})"


def _find(output: Path, how: str) -> Path | None:
    own = checkpoint.latest(output / "checkpoints")
    if own is not None and attempt_before(output) is not None:
        return own  # ranks that were started again after a crash go on with what this run has saved itself
    if how == "never":
        return None
    if how == "auto":
        return own
    if checkpoint.complete(Path(how)):
        return Path(how)
    return checkpoint.latest(Path(how) / "checkpoints") or checkpoint.latest(Path(how))


def refuse_changes(origin: Origin, run_state: RunState, batch_size: BatchSize) -> None:
    """Compare a checkpoint with the run that is about to load it.

    Raises:
        CheckpointError: The model, the optimizer, the data or the batches are others, with the differences.
    """
    if origin.is_imported:
        return  # another system knows nothing of this run's tables; names and shapes are compared as tensors are read
    path, steps, sequences = origin.path, origin.num_steps, int(origin.run["sequences"])
    differences = list(_differences(origin.run["record"], run_state.record, ""))
    advice = "; go on with the manifest as it was, or start anew with another run.output or --resume never"
    if differences:
        more = f"; and {len(differences) - MAX_SHOWN} more" if len(differences) > MAX_SHOWN else ""
        raise CheckpointError(f"{path}: of another run: {'; '.join(differences[:MAX_SHOWN])}{more}{advice}")
    now = batch_size.position_of(steps)
    if now != sequences:
        raise CheckpointError(
            f"{path}: its {steps} steps took {sequences} sequences, and the first {steps} steps of this run would take "
            f"{now}: the global batch is another; set train.global_batch (and batch_ramp) to what it was"
        )


def schedule_change(
    origin: Origin, table: LRScheduleTable, *, num_steps: int, folder: Path, sizes: BatchSize
) -> str | None:
    """Describe the learning rates of a run that goes on with another length; None where they are the same.

    Args:
        origin: The checkpoint that it goes on from.
        table: `[lr_schedule]`.
        num_steps: Of the whole run now.
        folder: Of the manifest.
        sizes: Of the run's batches.
    """
    planned, start = origin.run.get("planned_steps"), origin.num_steps
    if not isinstance(planned, int) or planned == num_steps:
        return None
    before = multiplier_of(table, num_steps=planned or 1, folder=folder, sizes=sizes)(start)
    after = multiplier_of(table, num_steps=num_steps, folder=folder, sizes=sizes)(start)
    if before == after:
        return None
    return (
        f"train.steps was {planned} and is {num_steps}, so the learning-rate schedule is another one: step {start + 1} "
        f"takes {after:.3g} of optimizer.lr, and would have taken {before:.3g}"
    )


def record_of(tables: Mapping[str, Any], factory: ModelFactory, source: Source | StreamSource) -> dict[str, Any]:
    """Return the values that must be equal when a run resumes.

    Args:
        tables: Of the manifest.
        factory: Of the model.
        source: Of the data.
    """
    return {
        "model": factory.record(),
        # When a parameter is stepped changes nothing of what comes out.
        "optimizer": {key: value for key, value in asdict(tables["optimizer"]).items() if key != "in_backward"},
        "train": {"seed": tables["train"].seed, "frozen": list(tables["train"].frozen)},
        "data": {**source.record(), "seq_len": tables["data"].seq_len, "order": tables["data"].order},
    }


def _differences(saved: Any, now: Any, name: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*saved, *now]):
            yield from _differences(saved.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif saved != now:
        yield f"{name} was {_shown(saved)} and is {_shown(now)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def clear_for(output: Path, start: int) -> Path | None:
    """Move what a run left of steps after `start` out of the way, into `previous-N` beside it; called by one rank.

    Checkpoints of a course that is given up would otherwise look newer than those of the new one. A run that goes on
    from its newest checkpoint has none.

    Args:
        output: The run's folder.
        start: Steps that are kept.

    Returns:
        The folder they went to, None if there was nothing.
    """
    later = [path for path in _checkpoints(output) if int(path.name.removeprefix("step-")) > start]
    if not later:
        return None
    numbers = [int(path.name.removeprefix("previous-")) for path in output.glob("previous-*")]
    aside = output / f"previous-{max(numbers, default=0) + 1}"
    (aside / "checkpoints").mkdir(parents=True)
    for name in ("metrics.jsonl", "manifest.toml", "environment.json"):
        if (output / name).exists():
            shutil.copy2(output / name, aside / name)
    for path in later:
        path.rename(aside / "checkpoints" / path.name)
    return aside


def _checkpoints(output: Path) -> list[Path]:
    found = (output / "checkpoints").glob("step-*")
    return sorted(path for path in found if path.name.removeprefix("step-").isdigit())
