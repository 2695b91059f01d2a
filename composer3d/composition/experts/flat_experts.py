"""Experts whose matrices stand one below the other in weights of two dims: which rows are one expert's.

Shapes: N experts, R rows of each, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer3d.composition.experts.expert_products import standing_in
from composer3d.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["reads_own_rows"]

# Attribute of a module with what was found: later its parameters are sharded, and its forward exchanges tokens.
_KNOWN = "composer3d_reads_own_rows"


def reads_own_rows(module: Any, number: int) -> bool:
    """Return whether the first of N equal blocks of rows of every weight is the first expert's alone, and so on.

    The code of the module's class runs with a token and its choice, of the first, the second and the last expert, and
    with weights that have no values: where what it multiplies begins and ends says which rows it reads.

    Args:
        module: Called with tokens, their experts and the weights of these; all its parameters have two dims.
        number: Of experts.
    """
    known: dict[int, bool] = vars(module).setdefault(_KNOWN, {})
    if number not in known:
        known[number] = all(_reads_own(module, expert, number) for expert in {0, 1, number - 1})
    return known[number]


def _reads_own(module: Any, expert: int, number: int) -> bool:
    import torch

    named = list(module.named_parameters())
    owners = {(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]): held for name, held in named}
    shapes = {key: tuple(held.shape) for key, held in owners.items()}
    read: dict[tuple[Any, str], bool] = {}

    def product(key: tuple[Any, str], x: Tensor, w_OI: Tensor) -> Tensor:
        if x.shape[-1] != w_OI.shape[-1]:
            raise ValueError("another width")
        rows, width = shapes[key]
        first, size = w_OI.storage_offset(), rows // number * width
        last = first + sum((n - 1) * stride for n, stride in zip(w_OI.shape, w_OI.stride(), strict=True))
        is_own = w_OI.numel() and first // size == expert == last // size
        read[key] = bool(is_own) and read.get(key, True)
        return x.new_zeros(*x.shape[:-1], w_OI.shape[0])

    for width in dict.fromkeys(size for shape in shapes.values() for size in shape):
        x, chosen = torch.zeros(1, width), torch.full((1, 1), expert)
        read.clear()
        try:
            with torch.no_grad(), standing_in(shapes, product, like=x, fqn="", by=""):
                type(module).forward(module, x, chosen, torch.ones(1, 1))
        except (PluginError, RuntimeError, ValueError, IndexError, TypeError):  # another width, or another use of them
            continue
        if read.keys() == shapes.keys():
            return all(read.values())
    return False
