"""Terms and factors of a loss that are made of parameters alone: weight decay, orthogonality, learned weights."""

from __future__ import annotations

from typing import Any

from composer3d import torch_compat
from composer3d.step.losses.loss_factors import constant_factor, past_views

__all__ = [
    "ELEMENTARY",
    "is_multiplied_by_tensor",
    "learned_products",
    "node_is_of_parameters",
    "past_learned",
    "stacked_losses",
]

# Of what penalties are made.
ELEMENTARY = frozenset(
    "Abs Add Alias Clamp ClampMin Clone Div Exp Expand LinalgVectorNorm Log LogSoftmax Mean Mul Neg Norm Permute Pow "
    "Reshape Select Sigmoid Softmax Softplus Sqrt Squeeze Stack Sub Sum T Tanh ToCopy Transpose Unsqueeze UnsafeView "
    "View".split()
)
# And of whole matrices: spectral norms, determinants, extremes.
_OF_MATRICES = frozenset(
    "Amax Amin Cat Cos Diagonal LinalgDet LinalgEigh LinalgSlogdet LinalgSvd Max Maximum Min Minimum Relu Sin Slice "
    "Split Std Trace Tril Triu Unbind Var".split()
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
        elif (name := type(each).__name__.partition("Backward")[0]) not in ELEMENTARY | _OF_MATRICES | _PRODUCTS:
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


def past_learned(node: Any) -> Any:
    """Return the node before products with, and quotients by, what is made of parameters: learned weights of tasks.

    A mean times a number that all ranks have is weighed by its targets as the mean is.
    """
    while (operand := _times_learned(node)) is not None:
        node = past_views(operand)
    return node


def stacked_losses(node: Any) -> list[Any]:
    """Return losses that a vector holds, past weights of all of them, and what of parameters alone is added to these.

    `exp(-s) * torch.stack([a, b]) + s` holds `a` and `b`, beside a term of `s`; no other vectors hold any.
    """
    node = past_views(node)
    name = type(node).__name__
    operands = [] if node is None else [operand for operand, _ in node.next_functions if operand is not None]
    if name.startswith("StackBackward"):
        return operands if len(torch_compat.node_shape(node) or ()) == 1 else []
    if name.startswith("CatBackward"):
        return operands if all(torch_compat.node_shape(operand) == (1,) for operand in operands) else []
    if name.startswith(("MulBackward", "DotBackward", "DivBackward")):
        return stacked_losses(operands[0] if len(operands) == 1 else _beside_learned(node))
    if not name.startswith(("AddBackward", "SubBackward", "RsubBackward")):
        return []
    found = [[each] if node_is_of_parameters(each) else stacked_losses(each) for each in operands]
    return [loss for losses in found for loss in losses] if all(found) else []


def learned_products(node: Any, *, into_sums: bool = True) -> list[Any]:
    """Return the nodes at which a loss, or a term of it, is multiplied or divided by a learned number.

    Args:
        node: Of the loss.
        into_sums: Whether to look at its terms, too.
    """
    found, pending = [], [past_views(node)]
    while pending:
        node = pending.pop()
        if (operand := _times_learned(node)) is not None:
            found.append(node)
            pending.append(past_views(operand))
        elif (factor := constant_factor(node)) is not None:
            pending.append(factor[1])
        elif into_sums and type(node).__name__.startswith(("AddBackward", "SubBackward", "RsubBackward")):
            pending += [past_views(each) for each, _ in node.next_functions if each is not None]
    return found


def _times_learned(node: Any) -> Any:
    """Return the operand of a product with a learned number; None for other nodes."""
    name = type(node).__name__
    if not name.startswith(("MulBackward", "DivBackward")):
        return None
    return _beside_learned(node)


def _beside_learned(node: Any) -> Any:
    operands = [operand for operand, _ in node.next_functions if operand is not None]
    if len(operands) < 2:
        return None
    learned = [node_is_of_parameters(operand) for operand in operands]
    if all(learned):
        return None
    if learned[1]:
        return operands[0]
    return operands[1] if learned[0] and not type(node).__name__.startswith("Div") else None


def is_multiplied_by_tensor(node: Any) -> bool:
    """Return whether a loss is multiplied by a scalar tensor, as by a number of tokens, and not by Python's numbers."""
    import torch

    while (found := constant_factor(node := past_learned(node))) is not None:
        if len(node.next_functions) > 1 and type(node).__name__.startswith("Mul"):
            constant = node._saved_other if node.next_functions[1][0] is None else node._saved_self
            narrow = torch.tensor(1, dtype=torch.float16 if constant.is_floating_point() else torch.int8)
            if torch.result_type(narrow, constant) != narrow.dtype:
                return True
        node = found[1]
    return False
