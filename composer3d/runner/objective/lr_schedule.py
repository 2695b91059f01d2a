"""Learning rates: the multiple of the optimizer's own rate is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from composer3d.manifest import resolve_reference

if TYPE_CHECKING:
    import torch

    from composer3d.runner.objective.batch_size import BatchSize
    from composer3d.runner.objective.lr_schedule_table import LRScheduleTable

__all__ = ["LRSchedule", "multiplier_of"]

MIN_RATIO = 0.1
WARMUP = 0.05
DECAY = 0.2
TIMESCALE = 10_000

# How much of a rise is done, and how much of a fall is left, when a part from 0 to 1 of its steps is over.
_RISES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda done: done,
        "cosine": lambda done: 0.5 * (1 - math.cos(math.pi * done)),
        "sqrt": lambda done: 1 - math.sqrt(1 - done),
        "quadratic": lambda done: done**2,
    }
)
_FALLS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
        "linear": lambda done: 1 - done,
        "wsd": lambda done: 1 - done,
        "sqrt": lambda done: 1 - math.sqrt(done),
        "exponential": lambda done: 2 * 0.5**done - 1,
    }
)


def multiplier_of(
    table: LRScheduleTable, *, num_steps: int, folder: Path, sizes: BatchSize | None = None
) -> Callable[[int], float]:
    """Return the function from a step, counted from 0, to the multiple of the learning rate in it.

    During w steps of warmup it is 1/w, 2/w, ..., 1, or rises from `warmup_start` to reach 1 in the step after them.
    Then it falls to `min_ratio`, which it reaches in the step after the last one, or in `decay_end`; `wsd`, and what
    has a `decay`, stays at 1 before it falls. With `unit = "samples"` all of these are numbers of samples, and a step
    is where the samples of all steps before have led.

    Args:
        table: `[lr_schedule]`, with its kind, warmup and final rate.
        num_steps: Of the whole run.
        folder: Of the manifest, for a callable.
        sizes: Of the run's batches, which a schedule over samples needs.

    Raises:
        ReferenceFailure: The callable cannot be imported.

    >>> from composer3d.runner.objective.lr_schedule_table import LRScheduleTable
    >>> f = multiplier_of(LRScheduleTable(use="linear", warmup=2, min_ratio=0.0), num_steps=6, folder=Path("."))
    >>> [f(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if table.unit is not None:
        assert sizes is not None, "a schedule over samples needs the batch of every step"
        length = sizes.position_of(num_steps)
        over_samples = _multiplier(table, num_steps=length, folder=folder)
        return lambda step: over_samples(sizes.position_of(step))
    return _multiplier(table, num_steps=num_steps, folder=folder)


def _multiplier(table: LRScheduleTable, *, num_steps: int, folder: Path) -> Callable[[int], float]:
    """Return the multiple by what the table counts: steps, or samples."""
    kind = table.kind
    is_own = kind != "constant" and ":" not in kind
    default = WARMUP if is_own else 0
    # A number may be beyond the run, where the fall ends beyond it too.
    num_warmup = _num_steps(default if table.warmup is None else table.warmup, num_steps)
    num_before = num_warmup + (table.warmup_delay if num_warmup else 0)
    rise = _rise(table, num_warmup)
    shape = _shape(table, num_steps=num_steps, num_warmup=num_warmup, folder=folder)

    def multiplier(step: int) -> float:
        if step < num_before:
            return rise(max(step - table.warmup_delay, 0))
        return shape(step)

    return multiplier


def _rise(table: LRScheduleTable, num_warmup: int) -> Callable[[int], float]:
    """Return the warmup, whose steps are counted from 0."""
    shape = table.warmup_shape
    if table.warmup_start is None and shape == "linear" and table.unit is None:
        return lambda step: (step + 1) / num_warmup
    start = table.warmup_start or 0.0

    def rise(step: int) -> float:
        if shape == "log":
            done = math.log(step + 1) / math.log(max(num_warmup, 2))
        else:
            done = _RISES[shape](step / num_warmup)
        return start + (1 - start) * done

    return rise


def _shape(table: LRScheduleTable, *, num_steps: int, num_warmup: int, folder: Path) -> Callable[[int], float]:
    """Return what comes after the warmup."""
    kind = table.kind
    if kind == "constant":
        return lambda step: 1.0
    if ":" in kind:
        own, arguments = resolve_reference(kind, folder), table.args or {}
        return lambda step: float(own(step, num_steps, **arguments))
    if kind == "inverse_sqrt":
        scale, floor = table.timescale or num_warmup or TIMESCALE, table.min_ratio or 0.0
        return lambda step: max(floor, math.sqrt(scale / (max(step - num_warmup, 0) + scale)))
    lowest = MIN_RATIO if table.min_ratio is None else table.min_ratio
    end = table.decay_end
    end = num_steps if end is None else int(end * num_steps) if isinstance(end, float) else end
    length = max(end - num_warmup, 0)
    decay = DECAY if table.decay is None and kind == "wsd" else table.decay
    if decay is not None:
        length = min(length, _num_steps(decay, num_steps))
    fall = _fall(table)

    def shape(step: int) -> float:
        done = min(max(step - (end - length), 0) / max(length, 1), 1.0)
        return lowest + (1 - lowest) * fall(done)

    return shape


def _fall(table: LRScheduleTable) -> Callable[[float], float]:
    """Return how much is left when a part of the fall is done."""
    if table.kind == "polynomial":
        power = 1.0 if table.power is None else table.power
        return lambda done: (1 - done) ** power
    once, cycles = _FALLS[table.kind], table.cycles or 1
    return lambda done: once(done if done >= 1 else cycles * done % 1.0)


def _num_steps(value: int | float, num_steps: int) -> int:
    """Return a number of steps, given itself or as a fraction of the run."""
    return int(value * num_steps) if isinstance(value, float) else value


class LRSchedule:
    """Sets the learning rates of an optimizer for a step.

    torch's LambdaLR counts its own calls and keeps a rate for each group; here nothing is kept, so a run that resumes
    on other ranks with other groups, or that skipped a step, has the rate of its step and nothing else.

    Args:
        optimizer: Its groups' present rates are the highest ones.
        multiplier: From a step to the multiple.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, multiplier: Callable[[int], float]) -> None:
        self._optimizer, self._multiplier = optimizer, multiplier
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._step = 0

    def apply(self, step: int) -> float:
        """Set the rates of a step, counted from 0; return that of the first group."""
        import torch

        self._step = step
        factor = self._multiplier(step)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor
        return self._rates[0] * factor if self._rates else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the step whose rates are set."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the rates of the saved step."""
        self.apply(int(state["step"]))
