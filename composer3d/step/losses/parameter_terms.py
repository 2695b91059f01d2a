"""Terms of a loss that are made of parameters alone: weight decay, elastic weights, orthogonality."""

from __future__ import annotations

from typing import Any

from composer3d import torch_compat
from composer3d.step.losses.loss_factors import constant_factor

__all__ = ["ELEMENTARY", "node_is_of_parameters"]

# Of what penalties are made.
ELEMENTARY = frozenset(
    "Abs Add Alias Clamp ClampMin Clone Div Exp Expand LinalgVectorNorm Log Mean Mul Neg Norm Permute Pow Reshape "
    "Select Sigmoid Softplus Sqrt Squeeze Stack Sub Sum T Tanh ToCopy Transpose Unsqueeze UnsafeView View".split()
)
_PRODUCTS = frozenset({"Bmm", "Dot", "Mm", "Mv"})


def node_is_of_parameters(node: Any, *, beside: bool = True) -> bool:
    """Return whether a node is made of parameters alone.

    Args:
        node: Of a loss, or of one of its terms.
        beside: Whether there may be other terms, so that constants of a parameter's shape are no data.
    """
    from torch import nn

    seen, pending = set(), [node]
    has_leaf = has_constant = is_sharded = False
    while pending:
        each = pending.pop()
        if each is None:
            has_constant = True
        elif type(each).__name__ == "AccumulateGrad":
            if not isinstance(each.variable, nn.Parameter):
                return False
            has_leaf, is_sharded = True, is_sharded or hasattr(each.variable, "full_tensor")
        elif type(each).__name__ == "WholeGradientBackward":
            has_leaf = is_sharded = True
        elif (name := type(each).__name__.partition("Backward")[0]) not in ELEMENTARY | _PRODUCTS:
            return False
        elif name in _PRODUCTS and any(operand is None for operand, _ in each.next_functions):
            return False  # with data, as a layer's
        elif each not in seen:
            seen.add(each)
            factor = constant_factor(each)
            operands = [operand for operand, _ in each.next_functions] if factor is None else [factor[1]]
            is_elementwise = beside and len(operands) == 2 and name in ("Add", "Mul", "Sub", "Div")
            pending += _without_constants(each, operands) if is_elementwise else operands
    return has_leaf and (is_sharded or not has_constant)  # a constant beside a plain parameter may be data


def _without_constants(node: Any, operands: list[Any]) -> list[Any]:
    """Return operands without a constant that leaves the shape of the other as it was; one of data has more dims."""
    own = [operand for operand in operands if operand is not None]
    if len(own) != 1:
        return operands
    made = own[0].variable.shape if type(own[0]).__name__ == "AccumulateGrad" else torch_compat.node_shape(own[0])
    return own if made is not None and tuple(made) == torch_compat.node_shape(node) else operands
