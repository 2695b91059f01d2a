"""Constants by which losses divide or multiply what they add up, and counts of it that autograd graphs show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.step.losses.sample_mixing import is_weight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "constant_divisor",
    "constant_factor",
    "is_contraction",
    "is_python_number",
    "multiple_of",
    "node_is_times_zero",
    "number",
    "past_multiples",
    "past_views",
    "reciprocal",
    "seen_counts",
    "uncounted",
]

# What changes neither a loss nor its reduction but for its form and sign.
_VIEWS = ("ToCopy", "View", "Squeeze", "Reshape", "Alias", "Clone", "Neg", "NanToNum")
_PASSED = (*_VIEWS, "MeanBackward", "SumBackward", "PermuteBackward", "_DDPSink")
# Through which the samples of what is added up are looked for.
_OF_SAMPLES = frozenset(
    "Abs Add Alias Clamp Clone Div Gather HuberLoss Log LogSigmoid LogSoftmax MseLoss Mul Neg NllLoss Pow Reshape Rsub "
    "SmoothL1Loss Sqrt Squeeze Sub Sum ToCopy Transpose UnsafeView Unsqueeze View".split()
)


def past_views(node: Any) -> Any:
    """Return the node before operations that change neither a loss nor its reduction but for its form and sign."""
    while node is not None:
        name = type(node).__name__
        if not name.startswith(_PASSED):  # steps ask: most nodes are none of these
            break
        if name.startswith(_VIEWS) or _is_of_number(node) or _is_turned_number(node):
            node, place = node.next_functions[0] if node.next_functions else (None, 0)
            if type(node).__name__.startswith("_DDPSink"):  # its outputs are its inputs, one by one
                node = node.next_functions[place][0]
        elif (wrapped := _wrapped_number(node)) is not None:
            node = wrapped
        else:
            break
    return node


def _wrapped_number(node: Any) -> Any:
    """Return the node of the one number among a model's outputs that DDP wraps to see unused parameters; else None."""
    if not type(node).__name__.startswith("_DDPSink"):
        return None
    numbers = [made for made, _ in node.next_functions if made is not None and torch_compat.node_shape(made) == ()]
    return numbers[0] if len(numbers) == 1 else None


def _is_of_number(node: Any) -> bool:
    """Return whether a node is a mean or sum over what has no dims."""
    return type(node).__name__.startswith(("MeanBackward", "SumBackward")) and not len(node._saved_self_sym_sizes)


def _is_turned_number(node: Any) -> bool:
    """Return whether a node permutes the dims of one element, as einsum does."""
    return type(node).__name__.startswith("PermuteBackward") and _is_one(node)


def _is_one(node: Any) -> bool:
    shape = torch_compat.node_shape(node)
    return shape is not None and all(size == 1 for size in shape)


def is_contraction(node: Any) -> bool:
    """Return whether a node adds up products of two operands' elements, as einsum and dot do, and not a weight's."""
    if not type(node).__name__.startswith(("BmmBackward", "DotBackward")) or not _is_one(node):
        return False
    return not any(is_weight(operand) for operand, _ in node.next_functions if operand is not None)


def constant_divisor(node: Any) -> float | None:
    """Return the number by which a node divides; None for other nodes, and where reading it synchronises a device."""
    if not type(node).__name__.startswith("DivBackward") or any(each for each, _ in node.next_functions[1:]):
        return None
    divisor = node._saved_other
    if hasattr(divisor, "dim") and (divisor.dim() or divisor.device.type != "cpu" or hasattr(divisor, "full_tensor")):
        return None
    return float(divisor)


def is_python_number(node: Any) -> bool:
    """Return whether a node divides by a number of Python's; a tensor may be any sum over a rank's samples."""
    import torch

    divisor = node._saved_other
    # Beside tensors without dims, torch promotes to the dtype of other tensors, not to that of numbers.
    narrow = torch.tensor(1, dtype=torch.float16 if divisor.is_floating_point() else torch.int8)
    return torch.result_type(narrow, divisor) == narrow.dtype


def reciprocal(factor: float) -> int | None:
    """Return the whole number above 1 by which a factor divides; None for other factors."""
    divisor = 1.0 / abs(factor)
    whole = round(divisor)
    return whole if whole > 1 and math.isclose(divisor, whole, rel_tol=1e-6) else None


def seen_counts(node: Any) -> Iterator[int]:
    """Yield numbers of samples and elements from which a sum may be made, as its graph shows them.

    Args:
        node: Of a sum, or of several that are added up.
    """
    seen, pending = set(), [node]
    while pending:
        each = pending.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        yield from _products(each)
        name = type(each).__name__.partition("Backward")[0]
        if name in _OF_SAMPLES or (each is node and is_contraction(each)) or name == "Permute":
            pending += [operand for operand, _ in each.next_functions]


def _products(node: Any) -> Iterator[int]:
    """Yield the products of the first dims of a node's operands."""
    shapes = [getattr(node, "_saved_self_sym_sizes", None)]
    shapes += [getattr(getattr(node, name, None), "shape", None) for name in ("_saved_self", "_saved_target")]
    for sizes in shapes:
        product = 1
        for size in sizes or ():
            product *= int(size)
            yield product


def number(value: Any) -> Tensor | None:
    """Return a tensor of one element as a scalar without a gradient; None for anything else."""
    import torch

    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return None
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().reshape(())


def constant_factor(node: Any) -> tuple[float, Any] | None:
    """Return a node's constant factor and the node of its operand; None for nodes without one."""
    import torch

    name = type(node).__name__
    if not name.startswith(("MulBackward", "DivBackward")):
        return None
    if len(node.next_functions) == 1:  # torch's own, by a number
        value = float(node._saved_other)
        return (value if name.startswith("Mul") else 1.0 / value), past_views(node.next_functions[0][0])
    (first, _), (second, _) = node.next_functions
    if (first is None) == (second is None) or (first is None and name.startswith("Div")):
        return None
    constant = node._saved_other if second is None else node._saved_self
    if not isinstance(constant, torch.Tensor) or constant.dim():
        return None
    value = float(constant)
    if not value:
        return None
    return (value if name.startswith("Mul") else 1.0 / value), past_views(first if second is None else second)


def node_is_times_zero(node: Any) -> bool:
    """Return whether a node multiplies something by 0."""
    node = past_views(node)
    name = type(node).__name__
    operands = [operand for operand, _ in node.next_functions if operand is not None] if node is not None else []
    if name.startswith("MulBackward") and len(operands) == 1:
        constants = [getattr(node, "_saved_self", None), node._saved_other]
        return any(_is_zero(each) for each in constants) or node_is_times_zero(operands[0])
    if name.startswith(("SumBackward", "MeanBackward", "DivBackward")) and len(operands) == 1:
        return node_is_times_zero(operands[0])
    return name.startswith("AddBackward") and bool(operands) and all(node_is_times_zero(each) for each in operands)


def _is_zero(value: Any) -> bool:
    import torch

    if not isinstance(value, torch.Tensor):
        return isinstance(value, int | float) and not value
    is_number = not value.dim() and not value.requires_grad and value.device.type == "cpu"
    return is_number and not float(value)


def past_multiples(node: Any) -> Any:
    """Return the node before products with constant scalars."""
    while type(node).__name__.startswith("MulBackward") and (found := constant_factor(node)) is not None:
        node = found[1]
    return node


def multiple_of(node: Any) -> float:
    """Return the product of the constant scalars by which a node multiplies."""
    factor = 1.0
    while type(node).__name__.startswith("MulBackward") and (found := constant_factor(node)) is not None:
        factor, node = factor * found[0], found[1]
    return factor


def uncounted(constant: float, verb: str) -> str:
    """Return what a loss shows whose sum is divided or multiplied by a constant, and what it may be otherwise."""
    return (
        f"it {verb} a sum by {constant:g}, and what it adds up does not show so many samples or targets; where that "
        'is counted over several backwards of this rank write reduction="mean", and where it is a constant, or counted '
        'over all ranks, reduction="sum"'
    )
