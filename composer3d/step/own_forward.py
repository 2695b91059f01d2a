"""Losses of a loop that runs its own forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.interfaces import Loss
from composer3d.mesh import Role
from composer3d.step.gradients import add_up
from composer3d.step.loss import PENALTY, as_loss
from composer3d.step.loss_graph import (
    Reduction,
    divisor_of_mean,
    divisors_of_terms,
    has_other_divisor,
    has_parameter_terms,
    reduction_of,
    refuse_unknown_terms,
    without_factors,
)
from composer3d.step.microbatches import tensors

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext
    from composer3d.step.criterion import Criterion

__all__ = ["OwnForward"]


class OwnForward:
    """Losses of one step of a loop that runs its own forward.

    Without a target every backward has equal weight, and in one of them each rank by what its mean was divided by,
    where the graph says so: valid targets, class weights, a mask. With a target, a mean is weighted by its valid
    tokens. A loop that divides its losses itself, by the number of its backwards, gets the sum of the divided losses.

    Args:
        target: Of the step, where the loop announces it.
        count: Its valid tokens.
        num_ranks: Ranks that have other samples or positions.
        total: Adds up a tensor over them.
    Collectives: without a target, one all-reduce an axis of two numbers a backward of a mean over targets.

    Attributes:
        count: Valid tokens of the step's target.
        calls: Backwards so far.
        is_scaled: Whether the loop divides its losses itself: gradients are then their plain sum.
    """

    def __init__(
        self,
        *,
        target: Any = None,
        count: int = 1,
        num_ranks: int = 1,
        total: Callable[[Tensor], None] = lambda numbers: None,
    ) -> None:
        self.count = count
        self._num_ranks, self._total = num_ranks, total
        self.calls = 0
        self._told = target is not None
        self._padded = self._told and any(count != t.numel() for t in tensors(target))
        self.is_scaled = False
        self._factors = 0.0

    @classmethod
    def announced(cls, target: Any, *, criterion: Criterion, context: RunContext) -> OwnForward:
        """Begin a step with its target, or without one."""
        return cls(
            target=target,
            count=1 if target is None else criterion.count(target),
            num_ranks=context.layout.degree(Role.BATCH, Role.SEQUENCE),
            total=partial(add_up, context=context),
        )

    def handed(self) -> float:
        """Return what the mean of the losses since the last call is times to be what the loop passed, summed up."""
        factors, self._factors = self._factors, 0.0
        return factors if self.is_scaled else 1.0

    def loss(self, value: Any, *, last: bool, equal: bool, reduction: Reduction | None) -> Loss:
        """Return the loss of the next backward with its count."""
        import torch

        self.calls += 1
        if not isinstance(value, torch.Tensor):
            is_even = equal and (self._told or self._num_ranks == 1)
            return as_loss(value, count=self.count, equal=is_even, reduction=reduction)
        factor, known = without_factors(value)
        if not self._told:
            if reduction is None and self._num_ranks > 1 and value.numel() == 1 and value.requires_grad:
                refuse_unknown_terms(value)
            share = self._share(value, is_sum=(reduction or known) == "sum")
            # A sum of one: its count is not to be read from its graph, by which ranks are weighed already.
            return self._scaled(as_loss(value * share, count=1, equal=True, reduction="sum"), factor)
        if (reduction or known or reduction_of(value)) == "sum":
            # The target's count belongs to all backwards together.
            return Loss(sum=value, count=self.count if self.calls == 1 else 0)
        is_uneven = not equal or (self._padded and (self.calls > 1 or not last))
        divisor = divisor_of_mean(value) if is_uneven or has_other_divisor(value) else None
        if divisor is not None:
            if self._num_ranks > 1 and has_parameter_terms(value):
                raise LossError(PENALTY)
            return self._scaled(as_loss(value, count=divisor, equal=True, reduction="mean"), factor)
        if self._padded and (self.calls > 1 or not last):
            raise LossError(
                "several means over parts of a padded target cannot be put together; "
                "give backward (sum, count) of each part"
            )
        return self._scaled(as_loss(value, count=self.count, equal=equal, reduction="mean"), factor)

    def _share(self, value: Tensor, *, is_sum: bool) -> Tensor | float:
        """Return this rank's weight in the mean of all ranks' losses, 1 where all weigh the same.

        Raises:
            LossError: A mean over other numbers of targets than on other ranks is one of several terms.
        """
        import torch

        if self._num_ranks == 1 or not value.requires_grad:
            return 1.0
        if is_sum:
            if has_parameter_terms(value):
                raise LossError(PENALTY)
            return float(self._num_ranks)  # the mean of all ranks' is to be their sum
        divisors = divisors_of_terms(value)
        if not divisors:
            return 1.0
        own = torch.as_tensor(divisors[0], dtype=torch.float64, device=value.device)
        numbers = torch.stack([own, own.square()])
        self._total(numbers)
        if divisor_of_mean(value) is not None and not has_parameter_terms(value):
            return (own * self._num_ranks / numbers[0].clamp(min=torch.finfo(torch.float64).tiny)).to(value.dtype)
        is_even = torch_compat.active_fake_mode() is not None or bool(
            (numbers[1] * self._num_ranks - numbers[0].square()).abs() <= 1e-9 * numbers[1]
        )
        if not is_even:
            raise LossError(
                f"a term of the loss is a mean over {float(own):g} targets on this rank, and over others elsewhere "
                f"({float(numbers[0]):g} in all), so ranks do not weigh the same; write run.step(n, target=target), or "
                "give backward (sum, count)"
            )
        return 1.0

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
