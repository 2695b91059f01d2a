"""The losses of a loop that keeps its own forward."""

from __future__ import annotations

from typing import Any

from composer3d.batch import tensors
from composer3d.errors import LossError
from composer3d.loss import Reduction, as_loss, reduction_of
from composer3d.protocol import Loss

__all__ = ["OwnForward"]


class OwnForward:
    """The losses of a loop that keeps its own forward.

    Without a target every backward weighs the same. With one, a mean stands for the target's valid tokens.
    """

    def __init__(self, *, target: Any = None, count: int = 1) -> None:
        self.count = count
        self.calls = 0
        self._told = target is not None
        self._padded = self._told and any(count != t.numel() for t in tensors(target))

    def loss(self, value: Any, *, last: bool, equal: bool, reduction: Reduction | None) -> Loss:
        """Give the loss of the next backward its count."""
        import torch

        self.calls += 1
        if not isinstance(value, torch.Tensor):
            return as_loss(value, count=self.count, equal=equal, reduction=reduction)
        if not self._told:
            return as_loss(value, count=1, equal=True, reduction="mean")
        if (reduction or reduction_of(value)) == "sum":
            # The target's count belongs to all backwards together.
            return Loss(sum=value, count=self.count if self.calls == 1 else 0)
        if self._padded and (self.calls > 1 or not last):
            raise LossError(
                "several means over parts of a padded target cannot be put together; "
                "give backward (sum, count) of each part"
            )
        return as_loss(value, count=self.count, equal=equal, reduction="mean")
