"""Loss function of a run, the elements that it sums over, and its reduction: sums or means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.interfaces import Batch, Loss, LossFunction
from composer3d.step.losses.divided_sums import is_times_zero, refuse_groups
from composer3d.step.losses.inside_values import InsideValues
from composer3d.step.losses.loss import (
    MEAN_OF_MEANS,
    as_loss,
    count_provisionally,
    count_valid,
    is_counted,
    loss_of_model,
    other_padding,
)
from composer3d.step.losses.loss_graph import Reduction, divisor_of_mean, has_other_divisor, reduction_of
from composer3d.step.losses.mixed_values import MixedLosses
from composer3d.step.losses.sample_parts import sample_parts
from composer3d.step.microbatches import num_samples, tensors

__all__ = ["Criterion"]

_OTHER_PADDING = (
    "the loss is one number, and its targets hold {number}, which is no class: if the loss leaves such targets out, "
    "they are not to be counted, and only -100 is known not to be. Pass target= and "
    "compose(count_fn=lambda target: int((target != {number}).sum())), or return a sum and its count: "
    "F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index={number}, reduction='sum'), "
    "(target != {number}).sum()"
)


class Criterion:
    """Computes losses of micro-batches, each as a sum and a count.

    Attributes:
        given: The loss function; None where the model returns its loss.
        told: Reduction of a scalar loss as stated to `compose`; it also holds for a loop's own losses, unlike the one
            found in the loss function's graph.
        mixed: Looks for losses that relate samples of a rank.
        inside: Follows shards of the model's inside into losses.
    """

    def __init__(
        self,
        loss_fn: LossFunction | None,
        count_fn: Callable[[Any], int] | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        self.given = loss_fn
        self.told = self._reduction = reduction
        self._loss_fn, self._count_fn = loss_fn or _loss_of_model, count_fn
        self.mixed, self.inside = MixedLosses(), InsideValues()
        self._counts: dict[int, int] = {}
        self._padding: int | None = None
        # Whether the divisor of a mean is in its graph, None: unknown; and may be another number than valid targets.
        self._says_divisor: bool | None = None
        self._has_other_divisor = False

    def end_following(self) -> None:
        """Follow nothing of what a loop computes any more."""
        self.mixed.detached.end()
        self.inside.end()

    def count_all(self, microbatches: Sequence[Batch]) -> list[int]:
        """Count the valid tokens of every micro-batch of a batch."""
        counts = [self.count(microbatch.target) for microbatch in microbatches]
        self._padding = None if self._count_fn is not None else other_padding(self._counted(microbatches))
        # Schedules pass targets back to the loss; found again by identity, nothing is counted twice.
        self._counts = {id(m.target): n for m, n in zip(microbatches, counts, strict=True) if m.target is not None}
        return counts

    def _counted(self, microbatches: Sequence[Batch]) -> Iterator[Any]:
        """Yield tensors whose values may be padding of a loss: targets, or else all inputs of a model."""
        for batch in microbatches:
            if batch.target is not None:
                yield from tensors(batch.target)
            else:
                yield from tensors((batch.args, batch.kwargs))

    def count(self, target: Any) -> int:
        """Count the elements that the loss of a target sums over; 1 for a target of None."""
        if target is None:
            return 1
        return int(self._count_fn(target)) if self._count_fn is not None else count_provisionally(target)

    def loss(self, output: Any, target: Any, *, equal: bool) -> Loss:
        """Compute the loss of one micro-batch.

        Args:
            output: The model's, such as logits_BSV.
            target: The micro-batch's, such as targets_BS.
            equal: Whether all micro-batches of the global batch have the same count.

        Raises:
            LossError: Its normalisation is unknown.
        """
        with self.mixed.detached.over_loss(num_samples((target, output)) or 0), self.inside.over_loss():
            value = self._loss_fn(output, target)
        if self.mixed.detached.seen is not None and self.told is None:
            self.mixed.report(self.mixed.detached.seen, loss_fn=self.given or "the model")
        self._learn(value, output, target)
        return self._as_loss(value, output, target, equal)

    def loss_of_evaluation(self, output: Any, target: Any, *, equal: bool) -> Loss:
        """Compute the loss of one micro-batch without gradients.

        Its graph is needed once, to distinguish a sum from a mean, if no step has done so before, and wherever the
        divisor of a mean is read from it.
        """
        import torch

        is_plain = equal and self._padding is None and not self._has_other_divisor and is_counted(target)
        if self._reduction is not None and self._says_divisor is not None and (is_plain or not self._says_divisor):
            with self.inside.over_loss():
                value = self._loss_fn(output, target)
            return self._as_loss(value, output, target, equal)
        with torch.enable_grad(), self.inside.over_loss():
            value = self._loss_fn(torch_compat.tree_map(_with_graph, output), target)
            self._learn(value, output, target)
            loss = self._as_loss(value, output, target, equal)
        return replace(loss, sum=_detached(loss.sum), auxiliary=_detached(loss.auxiliary))

    def _as_loss(self, value: Any, output: Any, target: Any, equal: bool) -> Loss:
        import torch

        if not equal and self.told is None and isinstance(value, torch.Tensor) and value.grad_fn is not None:
            if sample_parts(value, num_samples((target, output)) or 0) is not None:
                raise LossError(MEAN_OF_MEANS)  # whose parts have other samples on one device
        if self._padding is not None and isinstance(value, torch.Tensor) and not is_times_zero(value):
            if self._reduction == "sum" or divisor_of_mean(value) is None:
                raise LossError(_OTHER_PADDING.format(number=self._padding))
            equal = False
        if isinstance(value, torch.Tensor) and not is_counted(target) and not is_times_zero(value):
            if self._reduction == "mean" and divisor_of_mean(value) is not None:
                equal = False  # what it was divided by is its count
            elif self._count_fn is None:
                count_valid(target)  # a sum says no count, so the target has to
        count = self._counts.get(id(target))
        count = self.count(target) if count is None else count
        known = None  # any number, where the loss is stated to be a mean
        if self.told is None:
            known = (count, (num_samples((target, output)) or 0) if self._has_other_divisor or not equal else 0)
        return as_loss(value, count=count, equal=equal, reduction=self._reduction, known=known)

    def _learn(self, value: Any, output: Any, target: Any) -> None:
        import torch

        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            self._says_divisor = False
            return
        if (self._reduction is not None and self._says_divisor is not None) or is_times_zero(value):
            return
        if self._reduction is None:
            self._reduction = reduction_of(value)
            refuse_groups(value, num_samples((target, output)) or 0, (self.count(target),))
        self.mixed.look(
            value, num_samples((target, output)) or 0, reduction=self.told, loss_fn=self.given or "the model"
        )
        if self._says_divisor is None:
            self._says_divisor = self._reduction == "mean" and divisor_of_mean(value) is not None
            self._has_other_divisor = self._says_divisor and has_other_divisor(value)


def _with_graph(value: Any) -> Any:
    """Return a floating-point tensor as the beginning of a graph."""
    import torch

    is_differentiable = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if is_differentiable else value


def _detached(value: Any) -> Any:
    import torch

    return value.detach() if isinstance(value, torch.Tensor) else value


def _loss_of_model(output: Any, target: Any) -> Any:
    """Take the loss that the model computed itself."""
    return loss_of_model(output)
