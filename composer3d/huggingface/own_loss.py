"""The loss that a Hugging Face model computes itself, as a sum over valid tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer3d.errors import LossError
from composer3d.interfaces import Loss
from composer3d.step import count_valid

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["model_inputs", "model_loss"]

_MEAN, _SUM = 1, 2  # torch's numbers of reductions


def model_inputs(targets: Tensor) -> dict[str, Any]:
    """Return what a model is given besides its tokens, so that it computes the sum of its own loss.

    Args:
        targets: `[batch, sequence]`, the token that follows each one, or -100.
    """
    # The model would shift labels by one itself, and lose the last target; and divide by num_items_in_batch.
    return {"labels": targets, "shift_labels": targets, "num_items_in_batch": 1}


def model_loss(output: Any, target: Tensor, *, auxiliary_weight: float = 0.0) -> Loss:
    """Return the loss of an output that was made with `model_inputs`.

    Args:
        output: With `loss`, and `aux_loss` where routers of experts have one.
        target: As for `model_inputs`.
        auxiliary_weight: What `loss` contains of `aux_loss`; it joins the objective as its mean over micro-batches.

    Raises:
        LossError: The model ignores what it was given, so that its loss is a mean over shifted labels.
    """
    loss = getattr(output, "loss", None)
    if loss is None:
        raise LossError(
            f'the model returns no loss of its own ({type(output).__name__}); set [train] loss = "cross_entropy"'
        )
    reductions = set(_reductions(loss))
    if loss.grad_fn is not None and reductions != {_SUM}:
        what = "is a mean" if _MEAN in reductions else "is made in a way that cannot be told"
        raise LossError(
            f"the model's own loss {what}: its forward does not hand num_items_in_batch and shift_labels on; "
            'set [train] loss = "cross_entropy"'
        )
    auxiliary = getattr(output, "aux_loss", None)
    if auxiliary is None or not auxiliary_weight:
        return Loss(sum=loss, count=count_valid(target))
    weighted = auxiliary_weight * auxiliary
    return Loss(sum=loss - weighted, count=count_valid(target), auxiliary=weighted)


def _reductions(loss: Tensor) -> Iterator[int]:
    """Yield the reductions of the cross entropies that a loss was made of, looking through sums and quotients."""
    nodes: list[Any] = [loss.grad_fn]
    for _ in range(64):
        if not nodes:
            return
        node = nodes.pop()
        if node is None:
            continue
        saved = getattr(node, "_saved_reduction", None)
        if saved is not None:
            yield int(saved)
        elif type(node).__name__.startswith(("Div", "Add", "Mul", "ToCopy", "Alias", "View", "Squeeze")):
            nodes += [function for function, _ in node.next_functions]
