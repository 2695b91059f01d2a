"""The three int8 products of a linear layer, also where the summed dim of one of them is sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from composer3d import LinearSharding, torch_compat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Form", "Products"]

LARGEST = 127


@dataclass(frozen=True, kw_only=True)
class Form:
    """Choice of the products that are in int8.

    Args:
        output: y_NO = x_NI w_OI^T, for N tokens, I inputs and O outputs.
        grad_input: dx_NI = dy_NO w_OI.
        grad_weight: dw_OI = dy_NO^T x_NI.
        multiply: torchao's product of int8 matrices with a scale a row and a scale a column.
    """

    output: bool
    grad_input: bool
    grad_weight: bool
    multiply: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Products(torch.autograd.Function):
    """torchao's int8 linear layer, on whole operands or on local shards with the scales of the whole.

    torchao's own Function takes its options as an object that the compiler cannot put into a graph, and views gradients
    as matrices, which slices of a sequence are not.
    Collectives: on shards one all-reduce for the product that sums over the sharded dim, of a number a row of the one
        operand and a column of the other.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, sharding: LinearSharding | None
    ) -> Tensor:
        """Multiply inputs and weights."""
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.form, ctx.sharding = bias is not None, form, sharding
        matrix = weight.to(x.dtype).T
        y = _product(x, matrix, _agreeing(sharding, "inputs"), form) if form.output else x @ matrix
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply gradients of outputs by weights, and inputs by gradients of outputs."""
        x, weight = ctx.saved_tensors
        (gradient,), form, sharding = gradients, ctx.form, ctx.sharding
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            matrix = weight.to(x.dtype)
            narrow = form.grad_input
            of_x = _product(gradient, matrix, _agreeing(sharding, "outputs"), form) if narrow else gradient @ matrix
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            inputs = x.flatten(0, -2)
            narrow = form.grad_weight
            of_weight = _product(inputs.T, rows, _agreeing(sharding, "tokens"), form).T if narrow else rows.T @ inputs
        if ctx.needs_input_grad[2] and ctx.has_bias:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None


def _agreeing(sharding: LinearSharding | None, of: str) -> LinearSharding | None:
    return sharding if sharding is not None and sharding.of == of else None


def _product(a: Tensor, b: Tensor, sharding: LinearSharding | None, form: Form) -> Tensor:
    """Return a_RK @ b_KC, with a scale per row of `a` and column of `b`, all-reduced if K is sharded."""
    rows, columns = a.flatten(0, -2), b.T
    largest = torch.cat([rows.abs().amax(1), columns.abs().amax(1)])
    if sharding is not None:
        largest = sharding.largest(largest)
    of_rows, of_columns = (largest / LARGEST).split([rows.shape[0], columns.shape[0]])
    y = form.multiply(
        _rounded(rows, of_rows), _rounded(columns, of_columns).T, of_rows.contiguous(), of_columns.contiguous()
    )
    whole: Tensor = torch_compat.unviewed(y.view(*a.shape[:-1], y.shape[-1]))
    return whole


def _rounded(rows: Tensor, scales: Tensor) -> Tensor:
    """Round as torchao's `quantize_int8_rowwise` does, which finds scales itself."""
    inverse = 1.0 / scales.float().clip(1e-12)
    return (rows.float() * inverse.view(-1, 1)).round().clip(-LARGEST - 1, LARGEST).to(torch.int8).contiguous()
