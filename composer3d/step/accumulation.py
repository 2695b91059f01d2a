"""Gradient accumulation: the schedule without a pipeline, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from composer3d.interfaces import Batch, LossFunction

if TYPE_CHECKING:
    from composer3d.context import RunContext

__all__ = ["Accumulation"]


class Accumulation:
    """Runs every micro-batch through the only part."""

    def __init__(self, *, context: RunContext, loss_fn: LossFunction) -> None:
        self._context, self._loss_fn = context, loss_fn

    def train(self, microbatches: Sequence[Batch]) -> None:
        """Run forward and backward of every micro-batch."""
        context, module = self._context, self._context.parts[0].module
        for index, batch in enumerate(microbatches):
            context.microbatches.begin(index, index == len(microbatches) - 1, 0)
            with context.span("forward", microbatch=index):
                loss = self._loss_fn(module(*batch.args, **batch.kwargs), batch.target)
            with context.span("backward", microbatch=index):
                loss.backward()
            context.microbatches.end()

    def evaluate(self, microbatches: Sequence[Batch]) -> None:
        """Run the forward of every micro-batch and its loss."""
        module = self._context.parts[0].module
        for index, batch in enumerate(microbatches):
            self._context.microbatches.begin(index, index == len(microbatches) - 1, 0)
            self._loss_fn(module(*batch.args, **batch.kwargs), batch.target)
