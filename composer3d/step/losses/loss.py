"""One rule for losses: the sum over valid tokens of the global batch, divided by their number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.interfaces import Loss
from composer3d.step.losses.divided_sums import DividedSum, divided_sum, is_times_zero, without_nothing
from composer3d.step.losses.loss_graph import (
    RETURN_A_SUM,
    Reduction,
    divisor_of_mean,
    has_other_divisor,
    has_parameter_terms,
    reduction_of,
)
from composer3d.step.losses.term_weights import constant_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "IGNORE_INDEX",
    "MEAN_OF_MEANS",
    "PENALTY",
    "DividedLoss",
    "Nothing",
    "as_loss",
    "count_provisionally",
    "count_valid",
    "divided_loss",
    "is_counted",
    "loss_of_model",
    "other_padding",
]

IGNORE_INDEX = -100
MEAN_OF_MEANS = (
    "the loss is a mean, but micro-batches of this global batch have different numbers of valid tokens, and a mean of "
    "means is another loss; " + RETURN_A_SUM
)
PENALTY = (
    "the loss adds a term of parameters alone, as a penalty, to a sum or mean over other numbers of targets on every "
    "rank, and ranks that weigh their losses differently have one penalty: add its gradient after the backward "
    "(p.grad.add_(p.detach(), alpha=0.02) for 0.01 * p.pow(2).sum()), or set the optimizer's weight_decay"
)


@dataclass(frozen=True, kw_only=True)
class DividedLoss(Loss):
    """A mean as a sum and its divisor, which may be another number than its targets.

    Args:
        divided: Evidence of what it adds up; None where the divisor is that.
        factor: By which a loop has multiplied its count.
        constant: What is added to the mean; None where that is not seen, or made of parameters.
    """

    divided: DividedSum | None = None
    factor: float = 1.0
    constant: float | None = 0.0

    def times(self, factor: float) -> DividedLoss:
        """Return the loss with its count multiplied."""
        return replace(self, count=self.count * factor, factor=self.factor * factor)


class Nothing(Loss):
    """Something times 0, as loops write for a rank without targets."""


def count_valid(target: Any) -> int:
    """Count the elements of a loss: integer targets that are not -100, or elements of a floating-point target.

    Raises:
        LossError: The target is no tensor; `compose(count_fn=...)` is needed then.
    """
    import torch

    if isinstance(target, Mapping) and isinstance(target.get("labels"), torch.Tensor):
        target = target["labels"]
    if not isinstance(target, torch.Tensor):
        raise LossError(
            f"cannot count the valid tokens of a target of type {type(target).__name__}; return the loss as "
            "(sum, count), or as a mean, or pass compose(count_fn=...), which returns their number"
        )
    if target.is_floating_point() or target.is_complex():
        return target.numel()
    return int((target != IGNORE_INDEX).sum())


def is_counted(target: Any) -> bool:
    """Return whether what a loss adds up is counted in its target: a tensor, or `labels`; None is one sample each."""
    import torch

    own = target.get("labels") if isinstance(target, Mapping) else target
    return target is None or isinstance(own, torch.Tensor)


def count_provisionally(target: Any) -> int:
    """Count as `count_valid`, or the samples of a target of another form, for losses that report their own count.

    Gradients are divided by it before the backward, and corrected by what the losses report after it.

    Raises:
        LossError: There is no tensor of samples in it either.
    """
    import torch

    try:
        return count_valid(target)
    except LossError:
        leaves = (leaf for leaf in torch_compat.tree_leaves(target) if isinstance(leaf, torch.Tensor) and leaf.dim())
        if (first := next(leaves, None)) is None:
            raise
        return int(first.shape[0])


def other_padding(values: Iterable[Any]) -> int | None:
    """Return a negative number other than -100 in integer tensors, which may be the padding of a loss.

    Args:
        values: Targets, or arguments of a model; anything but integer tensors is ignored.
    """
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and not (value.dtype is torch.bool or value.is_floating_point()):
            if value.is_complex() or not value.numel() or value.is_meta:
                continue
            if torch_compat.active_fake_mode() is not None:
                return None
            least = int(torch.where(value == IGNORE_INDEX, 0, value).min())
            if least < 0:
                return least
    return None


def loss_of_model(output: Any) -> Any:
    """Return the loss that a model computed itself: `loss` of its output, as an attribute or a key, else the output."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output


def as_loss(
    value: Any,
    *,
    count: int | float | Tensor,
    equal: bool,
    reduction: Reduction | None,
    known: Sequence[float] | None = None,
) -> Loss:
    """Convert the result of a `loss_fn` to a sum and a count.

    Args:
        value: A `Loss`, `(sum, count)`, a scalar sum, or a scalar mean.
        count: Valid tokens of this micro-batch.
        equal: Whether every micro-batch of the global batch has that count. Where not, a mean is accepted if its
            divisor is in its graph: the mean of means weights tokens of short micro-batches higher (measured with
            padding: 39 % off).
        reduction: Of a scalar; None reads it from the graph.
        known: Numbers of samples or targets by which a mean may be divided; None for any.

    Raises:
        LossError: A mean where counts differ, or something else altogether.
    """
    total = value.sum if isinstance(value, Loss) else value[0] if isinstance(value, tuple | list) and value else value
    if not equal and has_parameter_terms(total):
        raise LossError(PENALTY)
    return _plain(_as_loss(value, count=count, equal=equal, reduction=reduction, known=known))


def divided_loss(mean: Tensor, divisor: Tensor | int, known: Sequence[float] | None = ()) -> DividedLoss:
    """Return a scalar mean as a sum, given its divisor; a mean over nothing is 0, with count 0.

    Args:
        mean: Scalar.
        divisor: As its graph shows it.
        known: Numbers of samples or targets that it may be; None where the loss is stated to be a mean.
    """
    import torch

    plain: Tensor = mean.full_tensor() if hasattr(mean, "full_tensor") else mean
    if isinstance(divisor, torch.Tensor) or not divisor:
        plain = without_nothing(plain, mean, torch.as_tensor(divisor))
    divided = divided_sum(mean, known)
    constant = 0.0 if divided is None else constant_of(mean, None if known is None else tuple(map(int, known)))
    return DividedLoss(sum=plain * divisor, count=divisor, divided=divided, constant=constant)


def _plain(loss: Loss) -> Loss:
    """Convert DTensors, as vocab-parallel cross-entropy returns them, to plain tensors, which ranks sum."""
    if not any(hasattr(value, "full_tensor") for value in (loss.sum, loss.count, loss.auxiliary)):
        return loss

    def plain(value: Any) -> Any:
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    return replace(loss, sum=plain(loss.sum), count=plain(loss.count), auxiliary=plain(loss.auxiliary))


def _said_of_output(output: Any) -> str:
    """Return how a loss is made of a model's output that was taken for one: logits, and a scalar beside them."""
    shape = list(output[0].shape)
    if hasattr(output, "auxiliary"):
        return (
            f"the loss is the model's output, logits of shape {shape} and an auxiliary loss, which is a part of the "
            "loss alone; return all of it with compose(loss_fn=...): composer3d.Loss(sum=F.cross_entropy("
            'output.logits.flatten(0, 1), target.flatten(), reduction="sum"), count=target.numel(), '
            "auxiliary=output.auxiliary)"
        )
    return (
        f"the loss is a pair whose first is a tensor of shape {shape}, not a sum; of a model that returns logits and "
        "a loss, take the loss with compose(loss_fn=lambda output, target: output[1]), and add the cross-entropy of "
        "output[0] where that is a balance of experts or another part of the loss alone"
    )


def _as_loss(
    value: Any,
    *,
    count: int | float | Tensor,
    equal: bool,
    reduction: Reduction | None,
    known: Sequence[float] | None,
) -> Loss:
    import torch

    if isinstance(value, Loss):
        return value
    if isinstance(value, tuple | list) and len(value) == 2:
        if isinstance(value[0], torch.Tensor) and value[0].numel() != 1:
            raise LossError(_said_of_output(value))
        return Loss(sum=value[0], count=value[1])
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise LossError(f"the loss is a {type(value).__name__}{shape}, not a scalar; " + RETURN_A_SUM)
    scalar = value.reshape(()) if value.dim() else value
    if is_times_zero(scalar):
        return Nothing(sum=scalar, count=0)
    if (reduction or reduction_of(scalar)) == "sum":
        return Loss(sum=scalar, count=count)
    if not equal or has_other_divisor(scalar):
        divisor = divisor_of_mean(scalar)
        if divisor is not None:
            return divided_loss(scalar, divisor, known)
    if not equal:
        raise LossError(MEAN_OF_MEANS)
    return Loss(sum=scalar * count, count=count)
