"""Losses of a loop that runs its own forward."""

from __future__ import annotations

from typing import Any

from composer3d.errors import LossError
from composer3d.interfaces import Loss
from composer3d.step.loss import (
    Reduction,
    as_loss,
    divisor_of_mean,
    has_other_divisor,
    reduction_of,
    without_factors,
)
from composer3d.step.microbatches import tensors

__all__ = ["OwnForward"]


class OwnForward:
    """Losses of one step of a loop that runs its own forward.

    Without a target every backward has equal weight. With one, a mean is weighted by the target's valid tokens. A loop
    that divides its losses itself, by the number of its backwards, gets the sum of the divided losses.

    Attributes:
        count: Valid tokens of the step's target.
        calls: Backwards so far.
        is_scaled: Whether the loop divides its losses itself: gradients are then their plain sum.
    """

    def __init__(self, *, target: Any = None, count: int = 1) -> None:
        self.count = count
        self.calls = 0
        self._told = target is not None
        self._padded = self._told and any(count != t.numel() for t in tensors(target))
        self.is_scaled = False
        self._factors = 0.0

    def handed(self) -> float:
        """Return what the mean of the losses since the last call is times to be what the loop passed, summed up."""
        factors, self._factors = self._factors, 0.0
        return factors if self.is_scaled else 1.0

    def loss(self, value: Any, *, last: bool, equal: bool, reduction: Reduction | None) -> Loss:
        """Return the loss of the next backward with its count."""
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
        is_uneven = not equal or (self._padded and (self.calls > 1 or not last))
        divisor = divisor_of_mean(value) if is_uneven or has_other_divisor(value) else None
        if divisor is not None:
            return self._scaled(as_loss(value, count=divisor, equal=True, reduction="mean"), factor)
        if self._padded and (self.calls > 1 or not last):
            raise LossError(
                "several means over parts of a padded target cannot be put together; "
                "give backward (sum, count) of each part"
            )
        return self._scaled(as_loss(value, count=self.count, equal=equal, reduction="mean"), factor)

    def _scaled(self, loss: Loss, factor: float) -> Loss:
        """Return a mean that the loop has multiplied by a factor with its count reduced to match."""
        if self.calls == 1:
            self.is_scaled = factor != 1.0
        if self.is_scaled != (factor != 1.0):
            before = "another number" if self.is_scaled else "1"
            raise LossError(
                f"backward {self.calls} of this step was given a loss times {factor:g}, and those before losses times "
                f"{before}; divide all losses of a step by the number of its backwards, or none of them, and they "
                "weigh the same"
            )
        self._factors += factor
        return Loss(sum=loss.sum, count=loss.count * factor, auxiliary=loss.auxiliary)
