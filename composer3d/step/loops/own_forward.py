"""Losses of a loop that runs its own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from composer3d.errors import LossError
from composer3d.interfaces import Loss
from composer3d.step.losses.divided_sums import is_times_zero, refuse_groups
from composer3d.step.losses.loss import PENALTY, DividedLoss, Nothing, as_loss, divided_loss
from composer3d.step.losses.loss_graph import (
    Reduction,
    divisor_of_mean,
    has_other_divisor,
    has_parameter_terms,
    reduction_of,
    without_factors,
)
from composer3d.step.losses.rank_weights import RankLoss, RankWeights
from composer3d.step.microbatches import tensors

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext
    from composer3d.step.losses.criterion import Criterion

__all__ = ["OwnForward"]


class OwnForward:
    """Losses of one step of a loop that runs its own forward.

    Without a target each rank's loss is weighed, in every backward, by what its mean was divided by, where the graph
    says so: valid targets, class weights, a mask. With a target, a mean is weighted by its valid
    tokens. Losses of several complete backwards are summed as written, and so are those of which the loop multiplies
    or divides one itself; others that are parts of one backward, by `last=False`, weigh the same.

    Args:
        target: Of the step, where the loop announces it.
        count: Its valid tokens.
        num_ranks: Ranks that have other samples or positions.
        weights: Weighs their losses where no target is announced.
    Collectives: without a target, those of `RankWeights`.

    Attributes:
        count: Valid tokens of the step's target, 1 without one.
        total: The same of all ranks.
        calls: Backwards so far.
        is_told: Whether the loop has announced the step's target.
    """

    def __init__(
        self,
        *,
        target: Any = None,
        count: int = 1,
        num_ranks: int = 1,
        weights: RankWeights | None = None,
    ) -> None:
        self.count = count
        self.total = count * num_ranks
        self._num_ranks, self._weights = num_ranks, weights or RankWeights()
        self.calls = 0
        self.is_told = target is not None
        self._padded = self.is_told and any(count != t.numel() for t in tensors(target))
        self._is_scaled = self._is_parted = self._has_counts = False
        self._factors = 0.0
        self._divided: list[Callable[[], float | None]] = []  # of each backward without a target

    @classmethod
    def announced(cls, target: Any, *, criterion: Criterion, context: RunContext) -> OwnForward:
        """Begin a step with its target, or without one."""
        weights = RankWeights.over(context)
        return cls(
            target=target,
            count=1 if target is None else criterion.count(target),
            num_ranks=weights.num_ranks,
            weights=weights,
        )

    @property
    def is_summed(self) -> bool:
        """Whether gradients are the plain sum of those of the losses as written."""
        return self._is_scaled or not (self.is_told or self._is_parted or self._has_counts)

    def handed(self) -> float:
        """Return the factor between the mean of the losses since the last call and the sum that the loop passed."""
        factors, self._factors = self._factors, 0.0
        return factors if self._is_scaled else 1.0

    def divided(self, counted: float) -> Callable[[], float | None] | None:
        """Return what tells by what the means so far were divided, over all ranks; None where a target was announced.

        Args:
            counted: Targets that losses have reported, of all ranks.
        """
        if self.is_told:
            return None
        if self._has_counts:
            return lambda: counted
        each = tuple(self._divided)

        def added() -> float | None:
            found = [divided() for divided in each]
            return None if None in found else sum(number for number in found if number is not None)

        return added

    def loss(self, value: Any, *, last: bool, equal: bool, reduction: Reduction | None, num_samples: int) -> Loss:
        """Return the loss of the next backward with its count.

        Args:
            value: As the loop gave it.
            last: Whether it completes a backward.
            equal: Whether all ranks have as many valid tokens.
            reduction: As it was stated; None reads it from the graph.
            num_samples: Number of samples in this rank's forward; 0 if unknown.
        """
        import torch

        self.calls += 1
        self._is_parted = self._is_parted or not last
        self._weights.num_samples = num_samples
        if not isinstance(value, torch.Tensor):
            self._has_counts = True
            is_even = equal and (self.is_told or self._num_ranks == 1)
            return as_loss(value, count=self.count, equal=is_even, reduction=reduction)
        factor, known = without_factors(value)
        if not self.is_told:
            if value.numel() != 1:
                return as_loss(value, count=1, equal=True, reduction="sum")  # which reports the fault
            return self._weighted(value, reduction, known, factor)
        is_nothing = is_times_zero(value)
        if reduction is None and not is_nothing and value.numel() == 1 and value.requires_grad:
            refuse_groups(value, num_samples, (self.count,))
        if factor != 1.0 and (is_nothing or (reduction or known) == "mean") and self._num_ranks > 1:
            return self._weighted(value, reduction, known, factor)  # of each backward by itself, as written
        if is_nothing:
            return self._scaled(Nothing(sum=value.reshape(()), count=0), factor)
        if (reduction or known or reduction_of(value)) == "sum":
            # The target's count belongs to all backwards together.
            return Loss(sum=value, count=self.count if self.calls == 1 else 0)
        is_uneven = not equal or (self._padded and (self.calls > 1 or not last))
        divisor = divisor_of_mean(value) if is_uneven or has_other_divisor(value) else None
        if divisor is not None:
            if self._num_ranks > 1 and has_parameter_terms(value):
                raise LossError(PENALTY)
            known_numbers = None if reduction is not None else (self.count, num_samples)
            return self._scaled(divided_loss(value.reshape(()), divisor, known_numbers), factor)
        if self._padded and (self.calls > 1 or not last):
            raise LossError(
                "several means over parts of a padded target cannot be put together; "
                "give backward (sum, count) of each part"
            )
        return self._scaled(as_loss(value, count=self.count, equal=equal, reduction="mean"), factor)

    def ranks(self) -> list[RankLoss]:
        """Return the losses of all ranks in the last backward; none where a target was announced."""
        return self._weights.ranks()

    def _weighted(self, value: Tensor, reduction: Reduction | None, known: Reduction | None, factor: float) -> Loss:
        weighted = self._weights.weighted(value, reduction=reduction, known=known, factor=factor)
        self._divided.append(self._weights.divided(value))
        # Its count is not to be read from its graph, by which ranks are weighed already.
        count = self.total / (self._num_ranks * self._weights.num_copies)
        return self._scaled(Loss(sum=weighted.loss.reshape(()) * count, count=count), weighted.factor)

    def _scaled(self, loss: Loss, factor: float) -> Loss:
        """Return a mean that the loop has multiplied by a factor with its count reduced to match."""
        self._is_scaled = self._is_scaled or factor != 1.0
        self._factors += factor
        return loss.times(factor) if isinstance(loss, DividedLoss) else replace(loss, count=loss.count * factor)
