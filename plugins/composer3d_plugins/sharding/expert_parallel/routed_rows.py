"""Rows of tokens in the order of their experts, and weighted sums of what comes back, each with one pass over them.

Indexing and its adjoint would copy rows several times: an out-of-place write copies what it writes to, a product of
results and weights is as large as the results, and the adjoint of a gather adds row by row.

Shape suffixes: T tokens, K experts a token, D width, R rows: pairs of a token and an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

__all__ = ["combined", "dispatched", "places_of"]


def places_of(order_R: Tensor) -> Tensor:
    """Return where each row stands, of an order of all rows."""
    places_R = torch.empty_like(order_R)
    return places_R.scatter_(0, order_R, torch.arange(order_R.shape[0], device=order_R.device))


class _Dispatched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, order_R: Tensor, places_R: Tensor, top_k: int, factor: float) -> Tensor:
        ctx.save_for_backward(places_R)
        ctx.top_k, ctx.factor = top_k, factor
        return hidden_TD.index_select(0, order_R // top_k)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None, None]:
        (places_R,) = ctx.saved_tensors
        return _sums(grad_RD, places_R.unflatten(0, (-1, ctx.top_k))).mul_(ctx.factor), None, None, None, None


def _sums(rows_RD: Tensor, places_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Return the weighted sums of the rows at places, gathered and added in one pass where torch knows the dtypes."""
    dtypes = {rows_RD.dtype, rows_RD.dtype if weights_TK is None else weights_TK.dtype}
    if places_TK.numel() and (dtypes == {torch.float32} or dtypes == {torch.float64}):
        return embedding_bag(places_TK, rows_RD, mode="sum", per_sample_weights=weights_TK)
    rows_TKD = rows_RD.index_select(0, places_TK.reshape(-1)).unflatten(0, tuple(places_TK.shape))
    return (rows_TKD if weights_TK is None else rows_TKD * weights_TK.unsqueeze(-1)).sum(1)


def dispatched(hidden_TD: Tensor, order_R: Tensor, places_R: Tensor, *, top_k: int, factor: float) -> Tensor:
    """Return the tokens of rows in an order; the gradient of a token is that of its rows, multiplied.

    Args:
        hidden_TD: Tokens.
        order_R: Rows, of which each token has consecutive ones, in order.
        places_R: As of `places_of`.
        top_k: Rows of a token.
        factor: Of the gradient.
    """
    result: Tensor = _Dispatched.apply(hidden_TD, order_R, places_R, top_k, factor)
    return result


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, back_RD: Tensor, weights_TK: Tensor, order_R: Tensor, places_R: Tensor, factor: float
    ) -> Tensor:
        ctx.save_for_backward(back_RD, weights_TK, order_R, places_R)
        ctx.factor = factor
        return _sums(back_RD, places_R.view_as(weights_TK), weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        back_RD, weights_TK, order_R, places_R = ctx.saved_tensors
        grad_RD = grad_TD.index_select(0, order_R // weights_TK.shape[1])
        grad_TK = None
        if ctx.needs_input_grad[1]:
            grad_R = torch.linalg.vecdot(back_RD.to(grad_RD.dtype), grad_RD)
            grad_TK = grad_R[places_R].view_as(weights_TK).to(weights_TK.dtype)
        grad_RD = _multiplied(grad_RD, (weights_TK.reshape(-1)[order_R] * ctx.factor).unsqueeze(-1))
        return grad_RD.to(back_RD.dtype), grad_TK, None, None, None


def _multiplied(x: Tensor, factor: Tensor) -> Tensor:
    """Return a product in the memory of the first, where that is as wide."""
    is_wide = torch.promote_types(x.dtype, factor.dtype) == x.dtype
    return x.mul_(factor) if is_wide else x * factor


def combined(back_RD: Tensor, weights_TK: Tensor, order_R: Tensor, places_R: Tensor, *, factor: float) -> Tensor:
    """Return the weighted sums of tokens' results; gradients of results are multiplied, and not those of weights.

    Args:
        back_RD: Results, in an order of rows.
        weights_TK: Of each.
        order_R: As of `dispatched`.
        places_R: As of `places_of`.
        factor: Of the gradient of results.
    """
    result: Tensor = _Combined.apply(back_RD, weights_TK, order_R, places_R, factor)
    return result
