"""Reference arithmetic of a step on one device: the plain model, and losses that are counted, divided and summed.

The step's own code is not used: a few lines compute the same here, so that a mistake there shows as a difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer3d import checkpoint, map_tensors
from composer3d.interfaces import Batch, Loss
from composer3d.step import as_loss, count_provisionally, full, loss_of_model, reduction_of, split_batch, to_device
from composer3d.verification.subject import Arithmetic, Kept, Subject, without_plugins

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = [
    "alone",
    "as_loss_of",
    "copies",
    "count_of",
    "loss_of",
    "microbatches",
    "objective_of",
    "of_dtype",
    "rest_of_divisor",
]


@contextlib.contextmanager
def alone(subject: Subject, which: Arithmetic, *, keep: bool = False) -> Iterator[Composition]:
    """Compose the model without plugins, on this process alone; in its own dtypes with those of precision.

    With `keep`, a plugin that trains other parameters than the model's (adapters) is kept in float64 too, since there
    would be nothing to compare with otherwise. Plugins that only round are left out.
    """
    kept: Kept = "precision" if which == "own" else "conversions" if keep else "nothing"
    # Losses are not scaled here, so gradients are not unscaled.
    with subject.composed(which, without_plugins(subject.manifest, keep=kept)) as run, run.without_grad_scaler():
        yield run


def microbatches(subject: Subject, number: int, degree: int, which: Arithmetic) -> list[Batch]:
    """Return the micro-batches of all data-parallel ranks, rank by rank."""
    size = subject.manifest.train.microbatch
    return [
        to_device(piece, subject.device)
        for rank in range(degree)
        for piece in split_batch(of_dtype(subject.batch(number, rank, degree), which), size)
    ]


def of_dtype(batch: Batch, which: Arithmetic) -> Batch:
    """Return the batch as it is, or with floating-point tensors in float64."""
    import torch

    if which == "own":
        return batch

    def convert(value: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(torch.float64) if tensor.is_floating_point() else tensor, value)

    return Batch(args=convert(batch.args), kwargs=convert(batch.kwargs), target=convert(batch.target))


def count_of(subject: Subject, piece: Batch) -> int:
    """Return the valid tokens of a micro-batch; 1 where it has no targets."""
    target = piece.target
    if target is None and subject.loss_fn is None:
        target = piece.kwargs.get("labels")
    if target is None:
        return 1
    return int(subject.count_fn(target)) if subject.count_fn is not None else count_provisionally(target)


def loss_of(subject: Subject, run: Composition, piece: Batch, count: int, counts: list[int]) -> Loss:
    """Return the loss of a micro-batch, as the run's own functions compute it; `counts` are those of all of them."""
    return as_loss_of(subject, run.model(*piece.args, **piece.kwargs), piece.target, count, counts)


def as_loss_of(subject: Subject, output: Any, target: Any, count: int, counts: list[int]) -> Loss:
    """Return the loss of a micro-batch's output; `counts` are those of all micro-batches."""
    import torch

    if subject.loss_fn is not None:
        value = subject.loss_fn(output, target)
    else:
        value = loss_of_model(output)
    scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return as_loss(value, count=count, equal=len(set(counts)) == 1, reduction=reduction_of(value) if scalar else None)


def objective_of(loss: Loss, counts: list[int], *, backward: bool) -> Tensor:
    """Return a micro-batch's contribution to the loss, divided by the global count before the backward, as in a run."""
    divisor = max(sum(counts), 1)
    share = loss.sum / divisor
    objective = share if loss.auxiliary is None else share + loss.auxiliary * (loss.count / divisor)
    if backward:
        objective.backward()
    return share.detach()


def rest_of_divisor(losses: list[Loss], counts: list[int]) -> float:
    """Return the remaining factor of a step's gradients and losses: losses may report counts of their own.

    They are divided by the targets' count before the backward, as in a run, which knows the losses' own after it.
    """
    total = sum(float(loss.count) for loss in losses)
    return max(sum(counts), 1) / total if total else 1.0


def copies(named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return gathered copies on the CPU."""
    # Without a plugin's wrappers: whoever reads one from a file imports the library that has its class.
    return {fqn: checkpoint.unwrapped(full(tensor)).clone().cpu() for fqn, tensor in named.items()}
