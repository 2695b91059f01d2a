"""The losses of a loop that keeps its own forward."""

from __future__ import annotations

from typing import Any

from composer3d.errors import LossError
from composer3d.interfaces import Loss
from composer3d.step.loss import Reduction, as_loss, reduction_of, without_factors
from composer3d.step.microbatches import tensors

__all__ = ["OwnForward"]


class OwnForward:
    """The losses of a loop that keeps its own forward.

    Without a target every backward weighs the same. With one, a mean stands for the target's valid tokens. A loop that
    divides its losses itself, by the number of its backwards, gets the sum of what it wrote.

    Attributes:
        count: Of the step's target.
        calls: Backwards so far.
        is_scaled: The loop divides its losses itself: gradients are their sum as it is.
    """

    def __init__(self, *, target: Any = None, count: int = 1) -> None:
        self.count = count
        self.calls = 0
        self._told = target is not None
        self._padded = self._told and any(count != t.numel() for t in tensors(target))
        self.is_scaled = False

    def loss(self, value: Any, *, last: bool, equal: bool, reduction: Reduction | None) -> Loss:
        """Give the loss of the next backward its count."""
        import torch

        self.calls += 1
        if not isinstance(value, torch.Tensor):
            return as_loss(value, count=self.count, equal=equal, reduction=reduction)
        factor, known = without_factors(value)
        if not self._told:
            return self._scaled(as_loss(value, count=1, equal=True, reduction="mean"), factor)
        if (reduction or known or reduction_of(value)) == "sum":
            # The target's count belongs to all backwards together.
            return Loss(sum=value, count=self.count if self.calls == 1 else 0)
        if self._padded and (self.calls > 1 or not last):
            raise LossError(
                "several means over parts of a padded target cannot be put together; "
                "give backward (sum, count) of each part"
            )
        return self._scaled(as_loss(value, count=self.count, equal=equal, reduction="mean"), factor)

    def _scaled(self, loss: Loss, factor: float) -> Loss:
        """Let a mean that the loop has multiplied with a factor count for as much less."""
        if self.calls == 1:
            self.is_scaled = factor != 1.0
        if self.is_scaled != (factor != 1.0):
            before = "another number" if self.is_scaled else "1"
            raise LossError(
                f"backward {self.calls} of this step was given a loss times {factor:g}, and those before losses times "
                f"{before}; divide all losses of a step by the number of its backwards, or none of them, and they "
                "weigh the same"
            )
        return Loss(sum=loss.sum, count=loss.count * factor, auxiliary=loss.auxiliary)
