"""Functions of one mean: a root, a logarithm, flooding.

Only of the mean over all ranks' samples are the function's value and derivative one device's, so that ranks exchange
their means first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.step.losses.loss_factors import constant_factor, past_views
from composer3d.step.losses.sample_mixing import base, operands_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BentMean", "bent_mean"]

_FUNCTIONS = {
    "Abs": "abs",
    "Exp": "exp",
    "Log": "log",
    "Log1P": "log1p",
    "Reciprocal": "reciprocal",
    "Rsqrt": "rsqrt",
    "Sigmoid": "sigmoid",
    "Sqrt": "sqrt",
    "Tanh": "tanh",
}
_INVERSES: dict[str, Callable[[Tensor], Tensor]] = {"Exp": lambda y: y.log(), "Sqrt": lambda y: y * y}
_DEPTH = 8


@dataclass(frozen=True, kw_only=True)
class BentMean:
    """A function of a mean times a constant, and another one added.

    Args:
        node: Of the function.
        mean: Node of the mean.
        slope: Factor of the mean in the function's argument.
        has_shift: Whether a constant is added to it there.
    """

    node: Any
    mean: Any
    slope: float
    has_shift: bool

    def shift(self, mean: Tensor) -> float | None:
        """Return the constant in the function's argument, given the mean; None where the graph does not show it."""
        import torch

        if not self.has_shift:
            return 0.0
        given = torch_compat.saved_tensor(self.node, "self")
        name, result = base(self.node), torch_compat.saved_tensor(self.node, "result")
        if given is None and result is not None and name in _INVERSES:
            given = _INVERSES[name](result.detach().double())
        if not isinstance(given, torch.Tensor) or hasattr(given, "full_tensor"):
            return None
        return float(given.detach().double() - self.slope * mean.double())

    def at(self, mean: float, shift: float) -> tuple[float, float]:
        """Return the function's value, and its derivative with respect to the mean."""
        import torch

        with torch.enable_grad():
            given = torch.tensor(mean, dtype=torch.float64, requires_grad=True)
            value = _function(self.node)(given * self.slope + shift)
            (derivative,) = torch.autograd.grad(value, given)
        return float(value.detach()), float(derivative)


def bent_mean(node: Any, is_mean: Callable[[Any], bool]) -> BentMean | None:
    """Return the function of a mean that a node computes; None for other nodes.

    Args:
        node: Of a term of a loss.
        is_mean: Whether a node is a mean whose divisor is known.
    """
    if base(node) not in _FUNCTIONS and not _is_power(node):
        return None
    slope, has_shift, inner = 1.0, False, node.next_functions[0][0]
    for _ in range(_DEPTH):
        if inner is None or torch_compat.node_shape(inner) != ():
            return None
        if base(inner) == "Neg":
            slope, inner = -slope, inner.next_functions[0][0]
        elif base(inner) in ("Add", "Sub", "Rsub") and len(operands_of(inner)) == 1:
            is_first = inner.next_functions[0][0] is not None
            sign = 1.0 if base(inner) == "Add" else -1.0
            factor = sign * float(inner._saved_alpha) if (base(inner) == "Rsub" or not is_first) else 1.0
            slope, has_shift, inner = slope * factor, True, operands_of(inner)[0]
        elif is_mean(inner):
            return BentMean(node=node, mean=inner, slope=slope, has_shift=has_shift)
        elif (found := constant_factor(inner)) is not None:
            slope, inner = slope * found[0], found[1]
        elif (other := past_views(inner)) is not inner and base(inner) not in ("NanToNum",):
            inner = other
        else:
            return None
    return None


def _is_power(node: Any) -> bool:
    return base(node) == "Pow" and isinstance(getattr(node, "_saved_exponent", None), int | float)


def _function(node: Any) -> Callable[[Tensor], Tensor]:
    import torch

    if base(node) == "Pow":
        return lambda given: given**node._saved_exponent
    found: Callable[[Tensor], Tensor] = getattr(torch, _FUNCTIONS[base(node)])
    return found
