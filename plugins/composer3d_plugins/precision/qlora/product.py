"""Product with a quantised weight, which is dequantised again in the backward.

Shape suffixes: I and O inputs and outputs; leading dims are free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from composer3d_plugins.precision.qlora.nf4 import Format

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StoredProduct"]


class StoredProduct(torch.autograd.Function):
    """Multiply by a quantised weight without saving its dequantised values for the backward.

    Defined at module level: the compiler cannot trace the creation of a class.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stored: Tensor, bias: Tensor | None, levels: Tensor, form: Format, is_transposed: bool
    ) -> Tensor:
        """Return y_...O = x_...I w_OI^T + bias_O, with a frozen bias."""
        ctx.save_for_backward(stored, levels)
        ctx.form, ctx.is_transposed = form, is_transposed
        weight = _values(stored, levels, form, is_transposed=is_transposed)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x_...I; everything else is frozen."""
        stored, levels = ctx.saved_tensors
        (gradient,) = gradients
        weight = _values(stored, levels, ctx.form, is_transposed=ctx.is_transposed)
        return gradient @ weight.to(gradient.dtype), None, None, None, None, None


def _values(stored: Tensor, levels: Tensor, form: Format, *, is_transposed: bool) -> Tensor:
    """Return w_OI; a transposed weight is stored as `[in, out]` and quantised along its outputs."""
    return form.dequantised(stored.t(), levels).t() if is_transposed else form.dequantised(stored, levels)
