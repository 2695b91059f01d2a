"""The three products of a linear layer in int8, where a rank has a share of what one of them sums over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from composer3d import Share, torch_compat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SharedProducts"]

LARGEST = 127


class SharedProducts(torch.autograd.Function):
    """torchao's int8 linear layer on a share, with the scales of the whole.

    Collectives: one all-reduce for the product that sums over what is cut, of a number a row of the one operand and a
        column of the other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, config: Any, share: Share) -> Tensor:
        """Multiply inputs and weights."""
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.config, ctx.share = bias is not None, config, share
        y = _product(x, weight.to(x.dtype).T, _agreeing(share, "inputs"), narrow=config.output)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply gradients of outputs by weights, and inputs by gradients of outputs."""
        x, weight = ctx.saved_tensors
        (gradient,), config, share = gradients, ctx.config, ctx.share
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _product(gradient, weight.to(x.dtype), _agreeing(share, "outputs"), narrow=config.grad_input)
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            of_weight = _product(x.flatten(0, -2).T, rows, _agreeing(share, "tokens"), narrow=config.grad_weight).T
        if ctx.needs_input_grad[2] and ctx.has_bias:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None


def _agreeing(share: Share, of: str) -> Share | None:
    return share if share.of == of else None


def _product(a: Tensor, b: Tensor, share: Share | None, *, narrow: bool) -> Tensor:
    """Return `a @ b`, with a scale a row of `a` and a column of `b`, agreed on if what is summed over is cut."""
    if not narrow:
        return a @ b
    training: Any = torch_compat.import_torchao("torchao.prototype.quantized_training.int8_mixed_precision")
    rows, columns = a.flatten(0, -2), b.T
    largest = torch.cat([rows.abs().amax(1), columns.abs().amax(1)])
    if share is not None:
        largest = share.largest(largest)
    of_rows, of_columns = (largest / LARGEST).split([rows.shape[0], columns.shape[0]])
    y: Tensor = training.scaled_int8_mm(
        _rounded(rows, of_rows), _rounded(columns, of_columns).T, of_rows.contiguous(), of_columns.contiguous()
    )
    return y.view(*a.shape[:-1], y.shape[-1])


def _rounded(rows: Tensor, scales: Tensor) -> Tensor:
    """Round as torchao's `quantize_int8_rowwise` does, which finds scales itself."""
    inverse = 1.0 / scales.float().clip(1e-12)
    return (rows.float() * inverse.view(-1, 1)).round().clip(-LARGEST - 1, LARGEST).to(torch.int8).contiguous()
