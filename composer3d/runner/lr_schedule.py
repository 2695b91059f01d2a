"""Learning rates: the multiple of the optimizer's own rate is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.manifest import resolve_reference

if TYPE_CHECKING:
    import torch

    from composer3d.runner.runner_tables import LRScheduleTable

__all__ = ["LRSchedule", "multiplier_of"]

MIN_RATIO = 0.1
WARMUP = 0.05
DECAY = 0.2


def multiplier_of(table: LRScheduleTable, *, num_steps: int, folder: Path) -> Callable[[int], float]:
    """Return the function from a step, counted from 0, to the multiple of the learning rate in it.

    During w steps of warmup it is 1/w, 2/w, ..., 1. After them it falls to `min_ratio` in a straight line or along half
    a cosine, which it reaches in the step after the last one; `wsd` stays at 1 before it falls in a straight line.

    Args:
        table: `[lr_schedule]`, with its kind, warmup and final rate.
        num_steps: Of the whole run.
        folder: Of the manifest, for a callable.

    Raises:
        ReferenceFailure: The callable cannot be imported.

    >>> from composer3d.runner.runner_tables import LRScheduleTable
    >>> f = multiplier_of(LRScheduleTable(use="linear", warmup=2, min_ratio=0.0), num_steps=6, folder=Path("."))
    >>> [f(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    kind = table.kind
    is_own = kind in ("cosine", "linear", "wsd")
    default = WARMUP if is_own else 0
    num_warmup = _num_steps(default if table.warmup is None else table.warmup, num_steps)
    shape = _shape(table, num_steps=num_steps, num_warmup=num_warmup, folder=folder)

    def multiplier(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup
        return shape(step)

    return multiplier


def _shape(table: LRScheduleTable, *, num_steps: int, num_warmup: int, folder: Path) -> Callable[[int], float]:
    """Return what comes after the warmup."""
    kind = table.kind
    if kind == "constant":
        return lambda step: 1.0
    if ":" in kind:
        own = resolve_reference(kind, folder)
        return lambda step: float(own(step, num_steps))
    lowest = MIN_RATIO if table.min_ratio is None else table.min_ratio
    length = num_steps - num_warmup
    if kind == "wsd":
        length = min(length, _num_steps(DECAY if table.decay is None else table.decay, num_steps))

    def shape(step: int) -> float:
        done = min(max(step - (num_steps - length), 0) / max(length, 1), 1.0)
        left = 0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine" else 1 - done
        return lowest + (1 - lowest) * left

    return shape


def _num_steps(value: int | float, num_steps: int) -> int:
    """Return a number of steps, given itself or as a fraction of the run."""
    return min(int(value * num_steps) if isinstance(value, float) else value, num_steps)


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
