"""The table `[evaluation]`: the loss and other figures on held-out data, and the best of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from composer3d.errors import KeyFault
from composer3d.manifest import table

__all__ = ["EvaluationTable"]


@table
class EvaluationTable:
    """Evaluation on the data that is held out.

    Args:
        every: Steps between two, and at the end; default: never.
        batches: At most so many global batches each time.
        metrics: Further figures by name: `accuracy`, or `module:callable`, called with the model's output and the
            targets of a micro-batch; it returns a sum and what it counts, or a mean.
        best: Figure by which evaluations are compared: `loss`, or one of `metrics`. The checkpoint of the best one is
            saved, and kept besides those of `checkpoint.keep`.
        goal: Which of two figures is better; default: the lowest loss, the highest of any other.
        patience: Evaluations without improvement after which the run ends; default: none ends it.
        min_improvement: Differences up to this are no improvement.
    """

    every: int | None = Field(default=None, ge=1)
    batches: int = Field(default=8, ge=1)
    metrics: dict[str, str] = Field(default_factory=dict)
    best: str | None = None
    goal: Literal["lowest", "highest"] | None = None
    patience: int | None = Field(default=None, ge=1)
    min_improvement: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _best_of_evaluations(self) -> EvaluationTable:
        stated = [name for name in ("goal", "patience") if getattr(self, name) is not None]
        stated += ["min_improvement"] * (self.min_improvement > 0)
        if self.best is None and stated:
            raise KeyFault(stated[0], f'{stated[0]} has no effect without best; write best = "loss"')
        if self.best is not None and self.every is None:
            raise KeyFault("best", "best compares evaluations, and there is none; write every = 100")
        if self.best is not None and self.best != "loss" and self.best not in self.metrics:
            names = ", ".join(("loss", *self.metrics))
            raise KeyFault("best", f'best = "{self.best}" is no figure of an evaluation; there is {names}')
        return self

    @model_validator(mode="after")
    def _metrics_are_references(self) -> EvaluationTable:
        for name, use in self.metrics.items():
            if use != "accuracy" and ":" not in use:
                raise KeyFault("metrics", f'metrics.{name} = "{use}" is not accuracy or "module:callable"')
            if name == "loss":
                raise KeyFault(
                    "metrics", "metrics.loss would replace the loss of the evaluation itself; name it otherwise"
                )
            if not name.isidentifier():
                raise KeyFault(
                    "metrics", f'metrics."{name}" is no name of a figure: use letters, digits and underscores'
                )
        return self
