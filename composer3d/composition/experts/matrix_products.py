"""Products of rows with matrices of experts, as torch's functions make them, taken apart to one matrix at a time.

Shape suffixes: R rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Product", "added", "grouped", "linear", "matmul", "product_of", "rowwise"]

# Returns y_RO of x_RI and w_OI, differentiable.
Product = Callable[["Tensor", "Tensor"], "Tensor"]


def product_of(product: Product, x: Tensor, w_OI: Tensor) -> Tensor:
    """Return y_RO; without rows there is nothing to quantise, and the weight's gradient is zero."""
    return product(x, w_OI).to(x.dtype) if x.numel() or w_OI.device != x.device else x @ w_OI.t()


def linear(product: Product, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `linear` does."""
    y = product_of(product, input, weight)
    return y if bias is None else y + bias


def added(input: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return what `addmm` and `baddbmm` do with a product; a factor of zero leaves out what is added."""
    y = y if alpha == 1 else alpha * y
    if not beta:
        return y
    return y + (input if beta == 1 else beta * input)


def matmul(product: Product, x: Tensor, weight: Tensor, *, is_first: bool) -> Tensor:
    """Return the product of rows and matrices, or, where these come first, of matrices and columns.

    Dims before the last two are those of several matrices, or of rows, and broadcast as torch's do.
    """
    import torch

    if weight.ndim == 2:
        return _one(product, x, weight, is_first=is_first)
    if x.ndim < weight.ndim:
        return torch.stack([matmul(product, x, matrix, is_first=is_first) for matrix in weight])
    dim = x.ndim - weight.ndim
    if weight.shape[0] == 1:
        return matmul(product, x, weight[0], is_first=is_first)
    each = x.expand(*x.shape[:dim], weight.shape[0], *x.shape[dim + 1 :]).unbind(dim)
    made = [matmul(product, of_one, matrix, is_first=is_first) for of_one, matrix in zip(each, weight, strict=True)]
    return torch.stack(made, dim)


def _one(product: Product, x: Tensor, matrix: Tensor, *, is_first: bool) -> Tensor:
    if not is_first:
        return product_of(product, x, matrix.t())
    return product_of(product, x, matrix) if x.ndim == 1 else product_of(product, x.mT, matrix).mT


def rowwise(
    product: Product, x: Tensor, weight: Tensor, experts_R: Tensor, *, is_turned: bool, is_first: bool
) -> Tensor:
    """Return the products of each row's own matrix, expert by expert.

    Args:
        product: Of rows and one matrix.
        x: Rows, one or several for each matrix.
        weight: Of all experts.
        experts_R: Those of the rows.
        is_turned: Whether the last two dims of matrices are the other way round.
        is_first: As of `matmul`.
    """
    import torch

    number = weight.shape[0]
    x = x.expand(experts_R.shape[0], *x.shape[-2:])
    if torch_compat.active_fake_mode() is not None:  # no values: as many for each
        rows = list(torch.arange(x.shape[0], device=x.device).tensor_split(number))
    else:
        rows = [torch.where(experts_R == index)[0] for index in range(number)]
    pieces = []
    for index, of_expert in enumerate(rows):
        matrix = weight[index].t() if is_turned else weight[index]
        pieces.append(_one(product, x[of_expert], matrix, is_first=is_first))
    y = torch.cat(pieces)
    return torch.empty_like(y).index_copy(0, torch.cat(rows), y)


def grouped(product: Product, input: Tensor, weight: Tensor, *, offs: Tensor, **options: Any) -> Tensor:
    """Return y_RO; rows beyond the last group's, of which torch says nothing, are zeros."""
    import torch

    pieces = [
        product_of(product, input[first:last], w_IO.t())
        for (first, last), w_IO in zip(_bounds(offs, input.shape[0]), weight, strict=True)
    ]
    y_RO = torch.cat(pieces)
    rest = input.shape[0] - y_RO.shape[0]
    return y_RO if not rest else torch.cat([y_RO, y_RO.new_zeros(rest, y_RO.shape[1])])


def _bounds(ends_E: Tensor, num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each group, and the one after its last; as many for each where there are no values."""
    number = ends_E.shape[0]
    is_fake = torch_compat.active_fake_mode() is not None
    ends = [num_rows * (index + 1) // number for index in range(number)] if is_fake else ends_E.tolist()
    yield from zip([0, *ends[:-1]], ends, strict=True)
