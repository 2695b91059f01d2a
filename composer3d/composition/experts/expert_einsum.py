"""Einsums with weights of experts as products of rows and one matrix each, which a precision or another rank computes.

Letters of an equation: of a weight one for experts, if it has several, one that is summed, and one of its results.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["einsum_by_expert", "einsum_by_row"]


def einsum_by_expert(
    multiply: Callable[[Tensor, Tensor], Tensor], equation: str, operands: Sequence[Tensor], place: int
) -> Tensor | None:
    """Return an einsum, of whose operands one is a weight: a product for each expert, then an einsum without it.

    Args:
        multiply: Returns y_RO of x_RI, of any dims before the last, and w_OI.
        equation: As `torch.einsum` takes it.
        operands: Tensors.
        place: Of the weight among them, of two dims, or of three with one for experts before them.

    Returns:
        None where it is no product of rows and a matrix for each expert: a weight's letter that is not one of the
        three, or one that is summed with several tensors at once.
    """
    import torch

    given, _, out = equation.replace(" ", "").partition("->")
    if "->" not in equation or len(operands) < 2:
        return None
    letters, out = _spelt_out(given.split(","), out, operands)
    weight, of_weight = operands[place], letters[place]
    is_several = weight.ndim == 3
    expert, matrix = (of_weight[:1], of_weight[1:]) if is_several else ("", of_weight)
    beside = [at for at in range(len(operands)) if at != place]
    summed = [each for each in matrix if each not in out and any(each in letters[at] for at in beside)]
    holders = [at for at in beside if summed and summed[0] in letters[at]]
    if len(summed) != 1 or len(matrix) != 2 or len(holders) != 1 or len(set(of_weight)) != len(of_weight):
        return None
    result, partner = matrix.replace(summed[0], ""), holders[0]
    of_rows = letters[partner]
    if result in of_rows or len(set(of_rows)) != len(of_rows):
        return None
    rows = operands[partner].movedim(of_rows.index(summed[0]), -1)
    of_rows = of_rows.replace(summed[0], "")
    matrices = list(weight.unbind(0)) if is_several else [weight]
    is_own = is_several and expert in of_rows
    each_rows = rows.unbind(of_rows.index(expert)) if is_own else [rows] * len(matrices)
    of_rows = of_rows.replace(expert, "") if is_own else of_rows
    turned = [each.t() if matrix.index(summed[0]) == 0 else each for each in matrices]
    made = torch.stack([multiply(x, w_OI) for x, w_OI in zip(each_rows, turned, strict=True)])
    of_made = (expert if is_several else "") + of_rows + result
    made = made if is_several else made[0]
    rest = [at for at in beside if at != partner]
    spelling = ",".join([of_made, *(letters[at] for at in rest)])
    return torch.einsum(f"{spelling}->{out}", made, *(operands[at] for at in rest))


def einsum_by_row(
    multiply: Callable[[Tensor, bool], Tensor], equation: str, operands: Sequence[Tensor], place: int
) -> Tensor | None:
    """Return an einsum, of whose operands one is a matrix for each row: its product with rows, then the rest.

    Args:
        multiply: Returns y of x, whose first dims are those of the matrices before their last two, then one of rows of
            the same matrix, and one that is summed; given whether that is the matrices' last dim.
        equation: As `torch.einsum` takes it.
        operands: Tensors.
        place: Of the matrices among them.

    Returns:
        None where it is no product of rows and a matrix for each of them.
    """
    import torch

    given, _, out = equation.replace(" ", "").partition("->")
    if "->" not in equation or len(operands) < 2:
        return None
    letters, out = _spelt_out(given.split(","), out, operands)
    of_weight = letters[place]
    chosen, matrix = of_weight[:-2], of_weight[-2:]
    beside = [at for at in range(len(operands)) if at != place]
    summed = [each for each in matrix if each not in out and any(each in letters[at] for at in beside)]
    holders = [at for at in beside if summed and summed[0] in letters[at]]
    if len(summed) != 1 or len(holders) != 1 or len(set(of_weight)) != len(of_weight):
        return None
    result, of_rows = matrix.replace(summed[0], ""), letters[holders[0]]
    if result in of_rows or len(set(of_rows)) != len(of_rows):
        return None
    more = [each for each in of_rows if each not in chosen and each != summed[0]]
    known = [each for each in chosen if each in of_rows]
    rows = torch.einsum(f"{of_rows}->{''.join([*known, *more])}{summed[0]}", operands[holders[0]])
    sizes, inner = operands[place].shape[:-2], rows.shape[len(known) :]
    shape = [rows.shape[known.index(each)] if each in known else 1 for each in chosen]
    x = rows.reshape(*shape, *inner).expand(*sizes, *inner)
    made = multiply(x.reshape(*sizes, -1, inner[-1]), matrix.index(summed[0]) == 1)
    made = made.reshape(*sizes, *inner[:-1], made.shape[-1])
    rest = [at for at in beside if at != holders[0]]
    spelling = ",".join([f"{chosen}{''.join(more)}{result}", *(letters[at] for at in rest)])
    return torch.einsum(f"{spelling}->{out}", made, *(operands[at] for at in rest))


def _spelt_out(letters: Sequence[str], out: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """Return the letters of every operand and of the result, with letters in the place of dots."""
    free = [each for each in string.ascii_letters if each not in "".join([*letters, out])]
    sizes = [
        operand.ndim - len(each) + 3 if "..." in each else 0 for each, operand in zip(letters, operands, strict=True)
    ]
    dots = "".join(free[: max(sizes, default=0)])
    spelt = [
        each.replace("...", dots[len(dots) - size :] if size else "") for each, size in zip(letters, sizes, strict=True)
    ]
    return spelt, out.replace("...", dots)
