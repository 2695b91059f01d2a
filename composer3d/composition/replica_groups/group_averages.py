"""Gradients and losses averaged over the groups that take part in a step, each weighted by its targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d.step.gradients import local

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from composer3d.replicas import Exchange
    from composer3d.step.step_state import StepState

__all__ = ["Averaged", "Before", "average_over_groups"]

_BUCKET_BYTES = 32 * 2**20
_NUMBERS = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class Before:
    """State that earlier batches of a step have left.

    Args:
        gradients: By parameter; means over `total` targets.
        total: Targets of all groups.
        count: Targets of this group.
        announced: Valid targets of all groups, as the step's state counts them.
    """

    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    total: float = 0.0
    count: float = 0.0
    announced: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Averaged:
    """Result of an exchange.

    Args:
        loss: Mean over the batch.
        count: Targets of the step so far, of all groups.
    """

    loss: Tensor
    count: float


def average_over_groups(
    state: StepState, loss: Tensor, before: Before, *, count: float, exchange: Exchange
) -> Averaged:
    """Replace this group's gradients by those of the global batch, and return its loss.

    Args:
        state: Of the open step, whose count and metrics become those of all groups.
        loss: Mean over this group's piece of the batch.
        before: Of earlier batches of the step.
        count: Targets of this group in the step so far.
        exchange: With the other groups.

    Raises:
        ExchangeError: A group is gone; gradients are then of no use.

    Memory: a bucket of 32 MiB. Collectives: two and more all-reduces over the groups.
    """
    import torch

    parameters = [each for each in state.parameters() if each.requires_grad]
    own, auxiliary = count - before.count, state.metrics.get("auxiliary_loss", 0.0)
    numbers = [
        own,
        float(loss) * own if own else 0.0,
        auxiliary * own,
        float(state.count - before.announced),
        float("auxiliary_loss" in state.metrics),
    ]
    numbers += [float(each.grad is not None) for each in parameters]
    added = torch.tensor(numbers, dtype=torch.float64)
    exchange.all_reduce(added)
    batch, loss_sum, auxiliary_sum, announced, has_auxiliary = added[:_NUMBERS].tolist()
    trained = [each for each, there in zip(parameters, added[_NUMBERS:].tolist(), strict=True) if there]
    total = before.total + batch
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    # A group's gradients are its sums, divided by what its losses have counted in the step so far.
    _sum([local(each.grad) for each in trained if each.grad is not None], count / total if total else 1.0, exchange)
    for parameter, gradient in before.gradients:
        share = before.total / total if total else 1.0
        kept = gradient * share
        parameter.grad = kept if parameter.grad is None else parameter.grad + kept
    state.count = before.announced + round(announced)
    if has_auxiliary and batch:
        state.metrics["auxiliary_loss"] = auxiliary_sum / batch
    mean = torch.tensor(loss_sum / batch if batch else float("nan"), dtype=loss.dtype, device=loss.device)
    return Averaged(loss=mean, count=total)


def _sum(gradients: Sequence[Tensor], weight: float, exchange: Exchange) -> None:
    """Replace local gradients by their weighted sums over the groups, a bucket after the other."""
    import torch

    for bucket in _buckets([gradient for gradient in gradients if gradient.numel()]):
        wide = torch.promote_types(bucket[0].dtype, torch.float32)
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).to("cpu", wide)
        if weight != 1.0:
            flat *= weight
        exchange.all_reduce(flat)
        pieces = flat.split([gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one dtype together, in their order, as many as fit into a bucket."""
    by_dtype: dict[torch.dtype, list[Any]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_dtype.values():
        bucket: list[Tensor] = []
        for gradient in alike:
            if bucket and sum(each.nbytes for each in bucket) + gradient.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket
