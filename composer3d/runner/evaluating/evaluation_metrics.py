"""Figures of an evaluation beside the loss, `[evaluation] metrics`: summed over micro-batches and ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import LossError, ReferenceFailure
from composer3d.manifest import resolve_reference
from composer3d.runner.objective.loss_functions import logits_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EvaluationMetrics", "accuracy"]

Metric = Callable[[Any, Any], Any]


class EvaluationMetrics:
    """Stands before the run's loss and, in an evaluation, computes the metrics of the outputs that the loss is given.

    So they are computed where the loss is: on the last stage of a pipeline, micro-batch by micro-batch.

    Args:
        names: References by the name of the figure.
        folder: Of the manifest.
        loss: The run's loss.
        count: Counts what the loss of targets is summed over: the weight of a metric that returns a mean.
        ignored: The target that carries no loss.

    Raises:
        ReferenceFailure: One leads nowhere, or cannot be called.

    Memory: two numbers a metric and micro-batch. Collectives: one all-reduce of two numbers a metric and evaluation.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        folder: Path,
        *,
        loss: Metric,
        count: Callable[[Any], int],
        ignored: int,
    ) -> None:
        self._loss, self._count = loss, count
        self._functions = {name: _made(use, folder, ignored) for name, use in names.items()}
        self._is_open = False
        self._found: list[list[float]] = []
        self._totals = [0.0] * 2 * len(self._functions)

    def loss(self, output: Any, target: Any) -> Any:
        """Return the run's loss; inside `evaluating`, compute the metrics too."""
        if self._is_open:
            import torch

            with torch.no_grad():
                self._found.append(self._figures(output, target))
        return self._loss(output, target)

    @contextlib.contextmanager
    def evaluating(self, num_microbatches: int) -> Iterator[None]:
        """Take in one batch; a pipeline may call the loss once more before, to learn shapes: the last calls count."""
        self._is_open, self._found = bool(self._functions), []
        try:
            yield
        finally:
            self._is_open = False
        for figures in self._found[-num_microbatches:]:
            self._totals = [total + figure for total, figure in zip(self._totals, figures, strict=True)]

    def settle(self) -> dict[str, float]:
        """Return every metric over all batches since the last call, and all ranks, by its name."""
        import torch
        import torch.distributed as dist

        if not self._functions:
            return {}
        shared = torch.tensor(self._totals, dtype=torch.float64)
        self._totals = [0.0] * len(self._totals)
        # Ranks that share an output, along tp, add it to sums and counts alike.
        dist.all_reduce(shared)
        sums, counts = shared[0::2].tolist(), shared[1::2].tolist()
        return {
            name: total / count if count else float("nan")
            for name, total, count in zip(self._functions, sums, counts, strict=True)
        }

    def _figures(self, output: Any, target: Any) -> list[float]:
        whole = _gathered(output)
        figures: list[float] = []
        for name, function in self._functions.items():
            value = function(whole, target)
            if isinstance(value, tuple | list) and len(value) == 2:
                total, count = float(value[0]), float(value[1])
            elif isinstance(value, int | float) or getattr(value, "numel", lambda: 0)() == 1:
                count = float(self._count(target) if target is not None else 1)
                total = float(value) * count
            else:
                raise LossError(
                    f"[evaluation] the metric {name} returned {type(value).__name__}; return a sum and what it counts, "
                    "or a mean"
                )
            figures += [total if count else 0.0, count]
        return figures


def accuracy(output: Any, target: Tensor, *, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Return how often the largest logit is that of the target, and the number of targets that are not ignored."""
    logits_XV, valid_X = logits_of(output), target != ignored  # X any dims, V the vocabulary
    return ((logits_XV.argmax(-1) == target) & valid_X).sum(), valid_X.sum()


def _made(use: str, folder: Path, ignored: int) -> Metric:
    if use == "accuracy":
        return lambda output, target: accuracy(output, target, ignored=ignored)
    found = resolve_reference(use, folder)
    if not callable(found):
        raise ReferenceFailure(f'"{use}" cannot be called: it is of type {type(found).__name__}')
    function: Metric = found
    return function


def _gathered(output: Any) -> Any:
    """Return an output whose tensors are whole on every rank; logits may be sharded over the vocabulary."""
    from composer3d import torch_compat

    def whole(value: Any) -> Any:
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    return torch_compat.tree_map(whole, output)
