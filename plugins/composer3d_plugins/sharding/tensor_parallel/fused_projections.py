"""Fused projections, several in one matrix: sharded per part, not across.

DTensor has no placement for it. The weight is therefore kept with its rows (or columns) in another order, in which the
share of each rank is one run: part 0 of rank 0, part 1 of rank 0, ..., part 0 of rank 1, and so on. The context knows
the order, so that initial weights, checkpoints and comparisons see the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer3d import PluginError
from composer3d.propagation import kind_of
from composer3d_plugins.sharding.tensor_parallel.weight_shards import attention_sizes, parent_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["parts_of", "runs_of"]


def runs_of(parts: Sequence[int], degree: int) -> list[tuple[int, int]]:
    """Return (start, length) of the runs of the model's order, in the order in which they are stored.

    >>> runs_of([4, 2], 2)
    [(0, 2), (4, 1), (2, 2), (5, 1)]
    """
    starts = [sum(parts[:index]) for index in range(len(parts))]
    return [
        (start + rank * (part // degree), part // degree)
        for rank in range(degree)
        for start, part in zip(starts, parts, strict=True)
    ]


def parts_of(model: nn.Module, fqn: str, rule: Any, rules: Any) -> tuple[int, ...]:
    """Return the sizes of the parts of a packed projection: as stated, or as the modules around it tell.

    Raises:
        PluginError: What is stated does not add up, or nothing tells.
    """
    module: Any = model.get_submodule(fqn)
    rows, columns = module.weight.shape
    is_output = rule.style == "packed_colwise"
    size = rows if is_output == (kind_of(module) == "linear") else columns
    what = "output" if is_output else "input"
    if rule.parts is not None:
        if sum(rule.parts) != size:
            raise PluginError(
                f'"{fqn}": its parts {list(rule.parts)} are {sum(rule.parts)} features, and it has {size} {what} '
                "features"
            )
        return tuple(rule.parts)
    parent = fqn.rpartition(".")[0]
    beside: list[Any] = [
        model.get_submodule(other)
        for other, that in rules.items()
        if that.style == "rowwise" and other.rpartition(".")[0] == parent
    ]
    inner = [int(other.weight.shape[1 if kind_of(other) == "linear" else 0]) for other in beside]
    sizes = attention_sizes(parent_of(model, fqn), inner)
    if is_output and sizes is not None:
        q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        if q + 2 * kv == size and q in inner:
            return (q, kv, kv)
    for width in inner if is_output else ():
        if size % width == 0 and size > width:
            return (width,) * (size // width)
    raise PluginError(
        f'"{fqn}": nothing tells the parts of its {size} {what} features',
        hint=f'write {{ style = "{rule.style}", parts = [...] }}',
    )
