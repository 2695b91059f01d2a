"""Product of a stored weight, which is dequantised again for the backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from composer3d_plugins.precision.qlora.nf4 import Format

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StoredProduct"]


class StoredProduct(torch.autograd.Function):
    """Multiply by a stored weight without keeping its values; at module level, for the compiler creates no class."""

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
    """Return values `[out, in]`; a transposed weight is stored by its own rows, which are inputs."""
    return form.dequantised(stored.t(), levels).t() if is_transposed else form.dequantised(stored, levels)
