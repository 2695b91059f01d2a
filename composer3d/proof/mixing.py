"""Whether samples are mixed: what a model or a loss computes of two micro-batches together, beside each by itself.

The reference is cut as the run cuts the batch, so it cannot show that the cut itself matters. It does where a loss is
no sum over samples: a contrastive one compares the samples of a micro-batch with each other, a mean with class weights
divides by those of the micro-batch. The gradient is then not that of the global batch, in any layout but one. A model
that mixes samples, as batch normalisation does, is another matter: that is what its author asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.proof.comparison import difference, relative
from composer3d.proof.one_device import alone, as_loss_of, count_of, microbatches
from composer3d.proof.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Batch

__all__ = ["NOT_MIXED", "Mixing", "mixing"]

log = logging.getLogger(__name__)

# Relative, and much above what a product of more rows rounds otherwise.
_SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How far two micro-batches together are from each by itself, relative; 0 where that is rounding, or not known.

    Args:
        model: What the model returns.
        loss: What the loss returns, of what the model returned for each by itself.
        unknown: Why the two could not be computed together; empty where they were, or where there is one alone.
    """

    model: float = 0.0
    loss: float = 0.0
    unknown: str = ""


NOT_MIXED = Mixing()


def mixing(subject: Subject, *, degree: int) -> Mixing:
    """Run the model and the loss on the first two micro-batches, each by itself and both together, in float64.

    Args:
        subject: What to run.
        degree: Data-parallel degree.
    """
    with alone(subject, "float64") as run, run.step(0):
        pieces = microbatches(subject, 0, degree, "float64")[:2]
        if len(pieces) < 2:
            return NOT_MIXED
        outputs = [run.model(*piece.args, **piece.kwargs) for piece in pieces]
        try:
            args, kwargs, target = _joined([(piece.args, piece.kwargs, piece.target) for piece in pieces])
            output, together = _joined(outputs), run.model(*args, **kwargs)
            model = _apart(together, output)
            loss = _loss(subject, pieces, outputs, output, target)
        except Exception as error:  # code has not to bear another batch size, or has batches along another dim
            log.debug("two micro-batches cannot be computed together", exc_info=True)
            return Mixing(unknown=type(error).__name__)
    if model is None:
        return Mixing(unknown="its outputs do not have the samples along dim 0")
    return Mixing(model=_beyond(model), loss=_beyond(loss))


def _loss(subject: Subject, pieces: Sequence[Batch], outputs: Sequence[Any], output: Any, target: Any) -> float:
    """Return how far the loss of both is from the sum of theirs; 0 where it takes more than what samples have."""
    if subject.loss_fn is None or any(leaf.dim() == 0 for leaf in _tensors(output)):
        return 0.0  # a number of the model's own, as what balances experts, is no sum, and may be weighed like one
    counts = [count_of(subject, piece) for piece in pieces]
    apart = sum(
        float(as_loss_of(subject, out, piece.target, count, counts).sum.detach())
        for out, piece, count in zip(outputs, pieces, counts, strict=True)
    )
    together = as_loss_of(subject, output, target, sum(counts), [sum(counts)])
    return relative(float(together.sum.detach()), apart)


def _joined(trees: Sequence[Any]) -> Any:
    """Return trees of tensors put together along dim 0; what is no tensor, or the same one in all, as it is."""
    import torch

    leaves = iter(
        [
            torch.cat(found)
            if isinstance(found[0], torch.Tensor) and found[0].dim() and any(one is not found[0] for one in found)
            else found[0]
            for found in zip(*map(torch_compat.tree_leaves, trees), strict=True)
        ]
    )
    return torch_compat.tree_map(lambda _: next(leaves), trees[0])


def _apart(one: Any, other: Any) -> float | None:
    """Return the largest difference of two trees of tensors; None where their samples lie otherwise."""
    both = [(left, right) for left, right in zip(_tensors(one), _tensors(other), strict=True) if left.dim()]
    if not both or any(left.shape != right.shape for left, right in both):
        return None
    return max(difference(left.detach(), right.detach()) for left, right in both)


def _tensors(tree: Any) -> list[Tensor]:
    import torch

    return [leaf for leaf in torch_compat.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _beyond(distance: float) -> float:
    return distance if distance > _SAME else 0.0
