"""Functions with a backward of their own that are tried on numbers: whether they do the same with every position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["is_rowwise"]

_SHAPE_BSI = 2, 6, 8
_ORDER = 3, 0, 5, 1, 4, 2  # of positions, none of which stays


def is_rowwise(module: nn.Module) -> bool:
    """Return whether a module without parameters computes each position from that position alone, backward too.

    It is run on random numbers in float64: in another order of positions results and gradients have that order, and of
    some positions they are those that all of them had there. What draws, or raises on three dims, is not.

    Args:
        module: On any device; run as it stands, in training or not.

    Memory: a few hundred numbers. Collectives: none.
    """
    import torch

    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return False
    with torch_compat.with_values(), torch.enable_grad(), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        x_BSI, gradient_BSI = (torch.randn(_SHAPE_BSI, generator=generator, dtype=torch.float64) for _ in range(2))
        try:
            whole = _run(module, x_BSI, gradient_BSI)
            ordered = _run(module, x_BSI[:, _ORDER], gradient_BSI[:, _ORDER])
            first = _run(module, x_BSI[:, :3], gradient_BSI[:, :3])
        except Exception:  # of the user's code, or of shapes that it does not take
            return False
    return all(
        torch.allclose(of_order, of_all[:, _ORDER], rtol=1e-12, atol=1e-14)
        and torch.allclose(of_first, of_all[:, :3], rtol=1e-12, atol=1e-14)
        for of_all, of_order, of_first in zip(whole, ordered, first, strict=True)
    )


def _run(module: Any, x_BSI: Tensor, gradient_BSI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of a forward, and the gradient of its input for one of the result's shape."""
    import torch

    x_BSI = x_BSI.clone().requires_grad_()
    y_BSI = module.forward(x_BSI)
    (found_BSI,) = torch.autograd.grad(y_BSI, x_BSI, gradient_BSI)
    return y_BSI.detach(), found_BSI
