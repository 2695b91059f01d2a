"""One rule for losses: the sum over valid tokens of the global batch, divided by their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.interfaces import Loss

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "IGNORE_INDEX",
    "Reduction",
    "as_loss",
    "count_provisionally",
    "count_valid",
    "divisor_of_mean",
    "divisors_of_terms",
    "has_other_divisor",
    "loss_of_model",
    "other_padding",
    "reduction_of",
    "without_factors",
]

Reduction = Literal["mean", "sum"]
IGNORE_INDEX = -100
# torch's losses that divide by the elements of their first argument.
_ELEMENTWISE = ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "SoftMarginLoss")

_RETURN_A_SUM = (
    "return a sum and its count instead, for example "
    "F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction='sum'), (target != -100).sum()"
)


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
            f"cannot count the valid tokens of a target of type {type(target).__name__}; "
            "return the loss as (sum, count), or pass compose(count_fn=...), which returns their number"
        )
    if target.is_floating_point() or target.is_complex():
        return target.numel()
    return int((target != IGNORE_INDEX).sum())


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

    for value in values if torch_compat.active_fake_mode() is None else ():
        if isinstance(value, torch.Tensor) and not (value.dtype is torch.bool or value.is_floating_point()):
            if value.is_complex() or not value.numel() or value.is_meta:
                continue
            least = int(torch.where(value == IGNORE_INDEX, 0, value).min())
            if least < 0:
                return least
    return None


def loss_of_model(output: Any) -> Any:
    """Return the loss that a model computed itself: `loss` of its output, as an attribute or a key, else the output."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output


def reduction_of(loss: Tensor) -> Reduction:
    """Return the reduction of a scalar loss, a sum or a mean, from its autograd graph.

    Raises:
        LossError: The last operation is neither.
    """
    return _reduction_at(_past_views(loss.grad_fn))


def _past_views(node: Any) -> Any:
    while node is not None and type(node).__name__.startswith(("ToCopy", "View", "Squeeze", "Reshape", "Alias")):
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def _known_reduction(node: Any) -> Reduction | None:
    name = type(node).__name__
    # 1 and 2 are torch's numbers of the reductions mean and sum.
    saved = getattr(node, "_saved_reduction", None)
    if saved == 1 or name.startswith(("MeanBackward", "DivBackward")):
        return "mean"
    if saved == 2 or name.startswith("SumBackward"):
        return "sum"
    terms = _terms(node)
    reductions = {_known_reduction(term) for term in terms}
    if len(reductions) != 1 or (any(_is_other(term) for term in terms) and _divisor(node) is None):
        return None
    return reductions.pop()


def _terms(node: Any) -> tuple[Any, ...]:
    """Return what a node adds up, past constant factors: the two parts of cross entropy with label smoothing."""
    if not type(node).__name__.startswith("AddBackward") or len(node.next_functions) != 2:
        return ()
    terms = [operand for operand, _ in node.next_functions]
    return () if None in terms else tuple(_past_factors(_past_views(term))[1] for term in terms)


def _reduction_at(node: Any) -> Reduction:
    known = _known_reduction(node)
    if known is not None:
        return known
    seen = "it has no graph" if node is None else f"its last operation is {type(node).__name__.removesuffix('0')}"
    raise LossError(
        f"cannot tell whether the loss is a sum or a mean ({seen}); "
        'pass compose(loss_reduction="mean") or "sum", in a manifest [train] loss = { use = "module:callable", '
        'reduction = "sum" }, or ' + _RETURN_A_SUM
    )


def divisor_of_mean(loss: Tensor) -> Tensor | int | None:
    """Return what a mean was divided by, from its autograd graph: means of micro-batches are combined by these.

    Cross entropy divides by its valid targets, whatever stands for padding, or by the sum of their class weights;
    `(losses * mask).sum() / mask.sum()` by its mask; other means by their elements.

    Returns:
        A number without a gradient; None where the graph does not say, or the divisor has a gradient itself.
    """
    return _divisor(_past_factors(_past_views(loss.grad_fn))[1])


def _divisor(node: Any) -> Tensor | int | None:
    name = type(node).__name__
    if terms := _terms(node):
        one, other = (_divisor(term) for term in terms)
        if one is None or other is None:
            return None
        return one if torch_compat.active_fake_mode() is not None or bool(one == other) else None
    if name.startswith("MeanBackward"):
        return int(node._saved_self_sym_numel)
    if name.startswith("DivBackward"):
        (divided, _), (divisor, _) = node.next_functions
        is_sum = divisor is None and _known_reduction(_past_views(divided)) == "sum"
        return _number(node._saved_other) if is_sum else None
    if _known_reduction(node) != "mean":
        return None
    if name.startswith("NllLoss"):
        return _number(node._saved_total_weight)
    return int(node._saved_self.numel()) if name.startswith(_ELEMENTWISE) else None


def divisors_of_terms(loss: Tensor) -> list[Tensor | int]:
    """Return the divisors of means over targets that may be padding, of every term of a loss that its graph shows."""
    return list(_counted_divisors(_past_factors(_past_views(loss.grad_fn))[1]))


def _counted_divisors(node: Any) -> Iterator[Tensor | int]:
    if type(node).__name__.startswith("AddBackward"):
        for operand, _ in node.next_functions:
            if operand is not None:
                yield from _counted_divisors(_past_factors(_past_views(operand))[1])
        return
    counts = type(node).__name__.startswith("NllLoss") and _known_reduction(node) == "mean"
    found = _divisor(node) if counts or _is_other(node) else None
    if found is not None:
        yield found


def has_other_divisor(loss: Tensor) -> bool:
    """Return whether a mean may be divided by another number than that of its targets, and its graph says by which."""
    return _is_other(_past_factors(_past_views(loss.grad_fn))[1])


def _is_other(node: Any) -> bool:
    name = type(node).__name__
    if terms := _terms(node):
        return any(_is_other(term) for term in terms) and _divisor(node) is not None
    if name.startswith("NllLoss"):
        return node._saved_weight is not None
    if name.startswith("MeanBackward"):
        return type(_past_views(node.next_functions[0][0])).__name__.startswith(("IndexBackward", "MaskedSelect"))
    return name.startswith("DivBackward") and _divisor(node) is not None


def _number(value: Any) -> Tensor | None:
    import torch

    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return None
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().reshape(())


def without_factors(loss: Tensor) -> tuple[float, Reduction | None]:
    """Return the factor by which a loop has scaled its loss, and the reduction before it: None if unknown.

    A loop that accumulates divides every loss by the number of its backwards. A sum that is divided, by its tokens
    then, is a mean.
    """
    factor, node = _past_factors(_past_views(loss.grad_fn))
    return factor, _known_reduction(node)


def _past_factors(node: Any) -> tuple[float, Any]:
    factor = 1.0
    while (found := _constant_factor(node)) is not None:
        if _known_reduction(found[1]) == "sum" and len(node.next_functions) > 1:
            break  # the loop's own factor may make it a mean
        factor, node = factor * found[0], found[1]
    return factor, node


def _constant_factor(node: Any) -> tuple[float, Any] | None:
    """Return a node's constant factor and the node of its operand; None for nodes without one."""
    import torch

    name = type(node).__name__
    if not name.startswith(("MulBackward", "DivBackward")):
        return None
    if len(node.next_functions) == 1:  # torch's own, by a number
        value = float(node._saved_other)
        return (value if name.startswith("Mul") else 1.0 / value), _past_views(node.next_functions[0][0])
    (first, _), (second, _) = node.next_functions
    if (first is None) == (second is None) or (first is None and name.startswith("Div")):
        return None
    constant = node._saved_other if second is None else node._saved_self
    if not isinstance(constant, torch.Tensor) or constant.dim():
        return None
    value = float(constant)
    if not value:
        return None
    return (value if name.startswith("Mul") else 1.0 / value), _past_views(first if second is None else second)


def as_loss(value: Any, *, count: int | float | Tensor, equal: bool, reduction: Reduction | None) -> Loss:
    """Convert the result of a `loss_fn` to a sum and a count.

    Args:
        value: A `Loss`, `(sum, count)`, a scalar sum, or a scalar mean.
        count: Valid tokens of this micro-batch.
        equal: Whether every micro-batch of the global batch has that count. Where not, a mean is accepted if its
            divisor is in its graph: the mean of means weights tokens of short micro-batches higher (measured with
            padding: 39 % off).
        reduction: Of a scalar; None reads it from the graph.

    Raises:
        LossError: A mean where counts differ, or something else altogether.
    """
    return _plain(_as_loss(value, count=count, equal=equal, reduction=reduction))


def _plain(loss: Loss) -> Loss:
    """Convert DTensors, as vocab-parallel cross-entropy returns them, to plain tensors, which ranks sum."""
    if not any(hasattr(value, "full_tensor") for value in (loss.sum, loss.count, loss.auxiliary)):
        return loss

    def plain(value: Any) -> Any:
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    return Loss(sum=plain(loss.sum), count=plain(loss.count), auxiliary=plain(loss.auxiliary))


def _as_loss(value: Any, *, count: int | float | Tensor, equal: bool, reduction: Reduction | None) -> Loss:
    import torch

    if isinstance(value, Loss):
        return value
    if isinstance(value, tuple | list) and len(value) == 2:
        if isinstance(value[0], torch.Tensor) and value[0].numel() != 1:
            raise LossError(
                f"the loss is a pair whose first is a tensor of shape {list(value[0].shape)}, not a sum; of a model "
                "that returns logits and a loss, take the loss with compose(loss_fn=lambda output, target: output[1])"
            )
        return Loss(sum=value[0], count=value[1])
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise LossError(f"the loss is a {type(value).__name__}{shape}, not a scalar; " + _RETURN_A_SUM)
    scalar = value.reshape(())
    if (reduction or reduction_of(scalar)) == "sum":
        return Loss(sum=scalar, count=count)
    if not equal or has_other_divisor(scalar):
        divisor = divisor_of_mean(scalar)
        if divisor is not None:
            plain = scalar.full_tensor() if hasattr(scalar, "full_tensor") else scalar
            return Loss(sum=plain * divisor, count=divisor)
    if not equal:
        raise LossError(
            "the loss is a mean, but micro-batches of this global batch have different numbers of valid tokens, "
            "and a mean of means is another loss; " + _RETURN_A_SUM
        )
    return Loss(sum=scalar * count, count=count)
