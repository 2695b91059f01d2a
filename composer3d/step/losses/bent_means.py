"""Functions of one mean: a root, a logarithm, flooding.

Only of the mean over all ranks' samples are the function's value and derivative one device's, so that ranks exchange
their means first.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.step.losses.loss_factors import constant_factor, past_views
from composer3d.step.losses.sample_mixing import base, operands_of
from composer3d.torch_compat.later_backwards import unwatched_grad

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BentMean", "bent_mean"]

_FUNCTIONS = {
    "Abs": "abs",
    "Atan": "atan",
    "Cos": "cos",
    "Erf": "erf",
    "Exp": "exp",
    "Log": "log",
    "Log1P": "log1p",
    "Reciprocal": "reciprocal",
    "Relu": "relu",
    "Rsqrt": "rsqrt",
    "Sigmoid": "sigmoid",
    "Sin": "sin",
    "Sqrt": "sqrt",
    "Tanh": "tanh",
}
# With options, or beside a constant, which their nodes save under these names.
_OPTIONS = {
    "Clamp": ("clamp", "min", "max"),
    "Gelu": ("nn.functional.gelu", "approximate"),
    "HuberLoss": ("nn.functional.huber_loss", "target", "delta"),
    "LogSigmoid": ("nn.functional.logsigmoid",),
    "Maximum": ("maximum", "other"),
    "Minimum": ("minimum", "other"),
    "MseLoss": ("nn.functional.mse_loss", "target"),
    "Silu": ("nn.functional.silu",),
    "SmoothL1Loss": ("nn.functional.smooth_l1_loss", "target", "beta"),
    "Softplus": ("nn.functional.softplus", "beta", "threshold"),
}
# Arguments by results, where a node saves these; NaN where several have one result.
_INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "Exp": lambda y: y.log(),
    "Reciprocal": lambda y: 1 / y,
    "Relu": lambda y: y / (y > 0),
    "Rsqrt": lambda y: 1 / (y * y),
    "Sigmoid": lambda y: y.logit(),
    "Sqrt": lambda y: y * y,
    "Tanh": lambda y: y.atanh(),
}
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

    def given(self) -> Tensor | None:
        """Return the function's argument; None where the graph does not show it."""
        import torch

        given = torch_compat.saved_tensor(self.node, "self")
        name, result = base(self.node), torch_compat.saved_tensor(self.node, "result")
        if given is None and result is not None and name in _INVERSES:
            given = _INVERSES[name](result.detach().double())
        if not isinstance(given, torch.Tensor) or hasattr(given, "full_tensor"):
            return None
        return given.detach().double()

    def shift(self, mean: Tensor) -> float | None:
        """Return the constant in the function's argument, given the mean; None where the graph does not show it.

        It is NaN of a result of 0 of relu, which other ranks' may be none of.
        """
        if not self.has_shift:
            return 0.0
        given = self.given()
        return None if given is None else float(given - self.slope * mean.double())

    def constant(self) -> float:
        """Return a number that two sets of the function's constants hardly share."""
        _, *names = _OPTIONS.get(base(self.node), ("",))
        saved = [getattr(self.node, f"_saved_{name}") for name in names]
        numbers = [0.0 if each is None or isinstance(each, str) else float(each) for each in saved]
        return sum((index + 1) ** 0.5 * each for index, each in enumerate(numbers))

    def at(self, mean: float, shift: float) -> tuple[float, float]:
        """Return the function's value, and its derivative with respect to the mean."""
        import torch

        with torch.enable_grad():
            shift = -math.inf if math.isnan(shift) else shift
            given = torch.tensor(mean, dtype=torch.float64, requires_grad=True)
            value = _function(self.node)(given * self.slope + shift)
            (derivative,) = unwatched_grad(value, given)
        return float(value.detach()), float(derivative)


def bent_mean(node: Any, is_mean: Callable[[Any], bool]) -> BentMean | None:
    """Return the function of a mean that a node computes; None for other nodes.

    Args:
        node: Of a term of a loss.
        is_mean: Whether a node is a mean whose divisor is known.
    """
    if base(node) not in _FUNCTIONS and not _is_power(node) and not _has_options(node):
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


def _has_options(node: Any) -> bool:
    """Return whether a node is a function of one number, its first operand, and of constants."""
    if base(node) not in _OPTIONS or operands_of(node) != [node.next_functions[0][0]]:
        return False
    saved = torch_compat.saved_tensor(node, "self")
    return saved is not None and not saved.dim()


def _function(node: Any) -> Callable[[Tensor], Tensor]:
    import torch

    if base(node) in _OPTIONS:
        name, *options = _OPTIONS[base(node)]
        saved = {each: _option(getattr(node, f"_saved_{each}")) for each in options}
        return functools.partial(operator.attrgetter(name)(torch), **saved)
    if base(node) == "Pow":
        return lambda given: given**node._saved_exponent
    found: Callable[[Tensor], Tensor] = getattr(torch, _FUNCTIONS[base(node)])
    return found


def _option(saved: Any) -> Any:
    import torch

    return saved.detach().double() if isinstance(saved, torch.Tensor) else saved
