"""Whether a gradient hook is linear: only then does it not matter whether gradients are added up before or after it."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import with_values

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Kind", "kind_of", "said_of"]

# Of the largest value; a hook may compute in float32, or keep its mask in fewer digits.
_CLOSE = 1e-4
# Relative to the gradient: rounding error of a projection that leaves little of it.
_NOISE = 1e-6
# Their range covers the limits to which hooks clamp.
_SCALES = (1e-6, 1e-3, 1.0, 1e3)


class Kind(enum.Enum):
    """Effect of a hook on gradients."""

    LINEAR = "is linear"
    OTHER = "is not linear in the gradient"
    FAILING = "fails on a gradient of random values"


def kind_of(hook: Callable[[Tensor], Any], shape: tuple[int, ...], dtype: torch.dtype, *, device: torch.device) -> Kind:
    """Call a hook on two random gradients of several sizes, on their sum, and on one of them again.

    Linear ones scale, mask, project, or only look. torch's random state is left as it was.

    Args:
        hook: As given to `register_hook`.
        shape: Of the full gradient.
        dtype: Of the gradient.
        device: Of the gradient.

    Memory: six tensors of the shape. Collectives: none.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if dtype.itemsize < 4 else dtype  # narrower dtypes would lose small or large values
    # Where check composes on fake tensors, these have values all the same.
    with torch.no_grad(), with_values():
        one, other = (_spread(shape, generator) for _ in range(2))
        for scale in _SCALES:
            left, right = (scale * one).to(device, dtype), (scale * other).to(device, dtype)
            try:
                first, second, together = _asked(hook, left), _asked(hook, right), _asked(hook, left + right)
                again = _asked(hook, left)
                least = _NOISE * float((left.abs() + right.abs()).max()) if left.numel() else 0.0
                is_linear = _close(together, first + second, least) and _close(again, first, least)
            except Exception:
                return Kind.FAILING
            if not is_linear:
                return Kind.OTHER
    return Kind.LINEAR


def _spread(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw numbers of many magnitudes, so that every limit divides some element from others."""
    import torch

    return torch.randn(shape, generator=generator) * 10.0 ** (3.0 * torch.rand(shape, generator=generator) - 1.5)


def _asked(hook: Callable[[Tensor], Any], gradient: Tensor) -> Tensor:
    """Return a hook's result for a gradient, which it may change in place."""
    given = gradient.clone()
    returned = hook(given)
    return given if returned is None else returned


def _close(one: Tensor, other: Tensor, least: float) -> bool:
    if not other.numel():
        return True
    return bool(((one - other).abs() <= least + _CLOSE * float(other.abs().max())).all())


def said_of(hook: Any) -> str:
    """Return which hook it is and where it is written."""
    function = inspect.unwrap(getattr(hook, "func", hook))
    name = getattr(function, "__qualname__", type(hook).__qualname__)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return name if code is None else f"{name}, {code.co_filename}:{code.co_firstlineno}"
