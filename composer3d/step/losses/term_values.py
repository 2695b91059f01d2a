"""Values of a loss' terms, computed again from what their autograd graph has saved, which keeps no result of a mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.step.losses.sample_mixing import base

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["value_of"]

_VIEWS = frozenset("Alias Clone Expand Reshape Squeeze ToCopy UnsafeView Unsqueeze View".split())
_SAVE_RESULT = frozenset(
    "Amax Amin Exp Expm1 LinalgVectorNorm LogSoftmax Logsumexp Norm Reciprocal Relu Rsqrt Sigmoid Softmax Sqrt Std "
    "Tanh".split()
)
_NAMES = {"Abs": "abs", "Cos": "cos", "Log": "log", "Log1P": "log1p", "LogSigmoid": "log_sigmoid", "Sin": "sin"}
_LOSSES = {
    "BinaryCrossEntropy": ("binary_cross_entropy", ("weight", "reduction")),
    "BinaryCrossEntropyWithLogits": ("binary_cross_entropy_with_logits", ("weight", "pos_weight", "reduction")),
    "HuberLoss": ("huber_loss", ("reduction", "delta")),
    "MseLoss": ("mse_loss", ("reduction",)),
    "NllLoss": ("nll_loss", ("weight", "reduction", "ignore_index")),
    "NllLoss2D": ("nll_loss2d", ("weight", "reduction", "ignore_index")),
    "SmoothL1Loss": ("smooth_l1_loss", ("reduction", "beta")),
}
_DEPTH = 32


class _UnknownError(Exception):
    """A graph has not saved what a value is made of."""


def value_of(node: Any, *, beside_zero: bool = False) -> Tensor | None:
    """Return what a node computed, without a gradient; None where its graph does not show it.

    Args:
        node: Of a loss' graph, before its backward.
        beside_zero: Whether to take 0 for what a mask leaves out, of which a graph keeps nothing; the caller compares.

    Memory: what the last operations of a loss made, again.
    """
    import torch

    try:
        with torch.no_grad():
            return _Values(beside_zero).of(node, 0)
    except (_UnknownError, AttributeError, IndexError, RuntimeError, TypeError):
        return None  # other ranks wait for this one to say so


class _Values:
    def __init__(self, beside_zero: bool) -> None:
        self._beside_zero = beside_zero

    def of(self, node: Any, depth: int) -> Tensor:
        name = base(node)
        if node is None or depth > _DEPTH:
            raise _UnknownError
        if name == "AccumulateGrad":
            return _plain(node.variable)
        if name in _SAVE_RESULT:
            return _saved(node, "result")
        if name in _NAMES:
            return _operator(_NAMES[name])(_saved(node, "self"))
        if name in _LOSSES:
            operator, arguments = _LOSSES[name]
            target = torch_compat.saved_tensor(node, "target")
            given = [getattr(node, f"_saved_{each}") for each in arguments]
            given = [_signed(each) if isinstance(each, int) else each for each in given]
            return _operator(operator)(_saved(node, "self"), target, *given)
        rule = _RULES.get(name) or (_of_view if name in _VIEWS else None)
        if rule is None:
            raise _UnknownError
        return rule(self, node, depth + 1)

    def operand(self, node: Any, index: int, depth: int) -> Tensor:
        return self.of(node.next_functions[index][0], depth)

    def operand_or_saved(self, node: Any, index: int, name: str, depth: int) -> Tensor:
        import torch

        found = torch_compat.saved_tensor(node, name)
        return _plain(found) if isinstance(found, torch.Tensor) else self.operand(node, index, depth)

    def filled(self, node: Any, index: int, depth: int) -> Tensor:
        """Return an operand, or 0 for a constant that nothing has saved."""
        import torch

        if node.next_functions[index][0] is not None:
            return self.operand(node, index, depth)
        if not self._beside_zero:
            raise _UnknownError
        return torch.zeros(())


def _operator(name: str) -> Callable[..., Tensor]:
    import torch

    found: Callable[..., Tensor] = getattr(torch.ops.aten, name)
    return found


def _plain(value: Any) -> Tensor:
    if value is None or hasattr(value, "full_tensor"):
        raise _UnknownError
    found: Tensor = value.detach()
    return found


def _saved(node: Any, name: str) -> Tensor:
    return _plain(torch_compat.saved_tensor(node, name))


def _of_view(values: _Values, node: Any, depth: int) -> Tensor:
    found, shape = values.operand(node, 0, depth), torch_compat.node_shape(node)
    if shape is None:
        raise _UnknownError
    return found.expand(shape) if base(node) == "Expand" else found.reshape(shape)


def _of_permutation(values: _Values, node: Any, depth: int) -> Tensor:
    found = values.operand(node, 0, depth)
    dims = getattr(node, "_saved_dims", None)
    if dims is not None:
        return found.permute(tuple(_signed(dim) for dim in dims))
    if base(node) == "T":
        return found.t()
    return found.transpose(_signed(node._saved_dim0), _signed(node._saved_dim1))


def _of_sum(values: _Values, node: Any, depth: int) -> Tensor:
    found, dims = values.operand(node, 0, depth), getattr(node, "_saved_dim", None)
    reduce = found.mean if base(node) == "Mean" else found.sum
    if dims is None:
        return reduce()
    given = (dims,) if isinstance(dims, int) else dims
    return reduce(tuple(_signed(dim) for dim in given), keepdim=node._saved_keepdim)


def _of_addition(values: _Values, node: Any, depth: int) -> Tensor:
    if len(node.next_functions) != 2:
        raise _UnknownError
    first, second = values.operand(node, 0, depth), values.operand(node, 1, depth)
    return first + second * node._saved_alpha if base(node) == "Add" else first - second * node._saved_alpha


def _of_product(values: _Values, node: Any, depth: int) -> Tensor:
    first = values.operand_or_saved(node, 0, "self", depth)
    second = torch_compat.saved_tensor(node, "other")
    if isinstance(second, int | float):
        return first * second if base(node) == "Mul" else first / second
    other = values.operand(node, 1, depth) if second is None else _plain(second)
    return first * other if base(node) == "Mul" else first / other


def _of_power(values: _Values, node: Any, depth: int) -> Tensor:
    exponent = node._saved_exponent
    return _saved(node, "self") ** (exponent if isinstance(exponent, int | float) else _plain(exponent))


def _of_clamp(values: _Values, node: Any, depth: int) -> Tensor:
    low, high = getattr(node, "_saved_min", None), getattr(node, "_saved_max", None)
    return _saved(node, "self").clamp(low, high)


def _of_choice(values: _Values, node: Any, depth: int) -> Tensor:
    import torch

    mask = torch_compat.saved_tensor(node, "mask" if base(node) == "MaskedFill" else "condition")
    if base(node) == "MaskedFill":
        if not values._beside_zero:
            raise _UnknownError
        return values.operand(node, 0, depth).masked_fill(mask, 0.0)
    return torch.where(mask, values.filled(node, 0, depth), values.filled(node, 1, depth))


def _of_selection(values: _Values, node: Any, depth: int) -> Tensor:
    name, found = base(node), values.operand(node, 0, depth)
    if name == "MaskedSelect":
        return found.masked_select(torch_compat.saved_tensor(node, "mask"))
    if name == "Index":
        return found[tuple(slice(None) if each is None else each for each in node._saved_indices)]
    index, dim = torch_compat.saved_tensor(node, "index"), _signed(node._saved_dim)
    return found.gather(dim, index) if name == "Gather" else found.index_select(dim, index)


def _of_list(values: _Values, node: Any, depth: int) -> Tensor:
    import torch

    found = [values.operand(node, index, depth) for index in range(len(node.next_functions))]
    return (torch.stack if base(node) == "Stack" else torch.cat)(found, _signed(node._saved_dim))


def _of_negation(values: _Values, node: Any, depth: int) -> Tensor:
    return -values.operand(node, 0, depth)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number  # negative ones are saved without their sign


_RULES: dict[str, Callable[[_Values, Any, int], Tensor]] = {
    "Add": _of_addition,
    "Sub": _of_addition,
    "Mul": _of_product,
    "Div": _of_product,
    "Pow": _of_power,
    "Neg": _of_negation,
    "Sum": _of_sum,
    "Mean": _of_sum,
    "Permute": _of_permutation,
    "Transpose": _of_permutation,
    "T": _of_permutation,
    "Clamp": _of_clamp,
    "ClampMin": _of_clamp,
    "ClampMax": _of_clamp,
    "MaskedFill": _of_choice,
    "Where": _of_choice,
    "MaskedSelect": _of_selection,
    "Index": _of_selection,
    "Gather": _of_selection,
    "IndexSelect": _of_selection,
    "Stack": _of_list,
    "Cat": _of_list,
}
