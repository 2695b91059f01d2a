"""The best evaluation of a run: its checkpoint is kept, and a run without improvement ends early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.runner.evaluating.evaluation_table import EvaluationTable

__all__ = ["BestModel"]


class BestModel:
    """Evaluations compared by one figure; equal on all ranks, since figures are, and saved with checkpoints.

    Args:
        table: `[evaluation]`, whose `best` is stated.

    >>> from composer3d.runner.evaluating.evaluation_table import EvaluationTable
    >>> best = BestModel(EvaluationTable(every=1, best="loss", patience=2))
    >>> [best.judge(step, {"loss": loss}) for step, loss in ((1, 3.0), (2, 2.5), (3, 2.6), (4, 2.7))]
    [True, True, False, False]
    >>> best.step, best.is_over
    (2, True)
    """

    # A run may begin to compare, or cease to, when it is resumed.
    is_dispensable = True

    def __init__(self, table: EvaluationTable) -> None:
        assert table.best is not None, "validated"
        self.name, self._patience, self._least = table.best, table.patience, table.min_improvement
        self._sign = 1.0 if (table.goal or ("lowest" if table.best == "loss" else "highest")) == "lowest" else -1.0
        self.step: int | None = None
        self.value = math.nan
        self.num_worse = 0

    def judge(self, step: int, figures: Mapping[str, float]) -> bool:
        """Return whether an evaluation is the best so far; a figure that is not a number never is.

        Args:
            step: Optimizer steps done.
            figures: Loss and metrics, by name.
        """
        value = figures[self.name]
        is_better = self.step is None or self._sign * (self.value - value) > self._least
        if not is_better or math.isnan(value):
            self.num_worse += 1
            return False
        self.step, self.value, self.num_worse = step, value, 0
        return True

    @property
    def is_over(self) -> bool:
        """Whether as many evaluations as `patience` have brought nothing better."""
        return self._patience is not None and self.num_worse >= self._patience

    @property
    def checkpoint(self) -> tuple[str, ...]:
        """Names of checkpoints that are kept besides the last ones."""
        return () if self.step is None else (f"step-{self.step}",)

    def __str__(self) -> str:
        if self.step is None:
            return f"no evaluation had a {self.name} that is a number"
        where = f"after step {self.step}, kept in checkpoints/step-{self.step}"
        return f"best evaluation: {self.name} {self.value:.4f} {where}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best figure, its step, and the evaluations since."""
        return {"name": self.name, "step": self.step, "value": self.value, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on comparing, unless another figure was compared."""
        if state["name"] == self.name and state["step"] is not None:
            self.step, self.value, self.num_worse = int(state["step"]), float(state["value"]), int(state["num_worse"])
