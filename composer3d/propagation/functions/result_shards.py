"""Sharding of a function's result, from its local shard and its shadow on meta, which has the global sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation.functions.function_dims import JOINS
from composer3d.propagation.functions.view_shapes import Placed
from composer3d.propagation.shards import (
    TENSOR_AXIS,
    PropagationError,
    Ranges,
    ShardSpec,
    attach,
    common_parts,
    interned,
    shadow_of,
    sources_of,
)

__all__ = ["marked", "pair"]


def pair(
    share: Any, whole: Any, specs: Sequence[ShardSpec], name: str, *, degree: int, local: Callable[[int], int]
) -> Any:
    """Mark each result with the dim along which it is sharded; return the local results.

    Args:
        share: What a function returned for the local shards: a tensor, or a tree of them.
        whole: What it returned for the shadows.
        specs: Metadata of its sharded arguments.
        name: Of the function, for messages.
        degree: Ranks along the axis.
        local: Returns the size of this rank's shard of a part.

    Raises:
        PropagationError: The results do not differ by one dim, of which the local one is this rank's shard.
    """
    shares, wholes = torch_compat.tree_leaves(share), torch_compat.tree_leaves(whole)
    if len(shares) != len(wholes):
        raise PropagationError("it takes the sharded dim apart")
    for one, other in zip(shares, wholes, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        differing = [dim for dim in range(one.ndim) if one.ndim != other.ndim or one.shape[dim] != other.shape[dim]]
        if not differing:
            if name.startswith("new_"):
                continue
            raise PropagationError("it mixes the features of all ranks")
        dim = differing[0]
        if one.ndim != other.ndim or len(differing) > 1:
            raise PropagationError(f"a share is {list(one.shape)}, the whole {list(other.shape)}")
        joined = name in JOINS and all(spec.placed.dim == dim for spec in specs) and len(specs) > 1
        parts = (
            tuple(part for spec in specs for part in spec.placed.parts)
            if joined and sum(sum(spec.placed.parts) for spec in specs) == other.shape[dim]
            else common_parts(specs, other.shape[dim])
        )
        if sum(map(local, parts)) != one.shape[dim]:
            raise PropagationError(f"a share is {list(one.shape)}, the whole {list(other.shape)}")
        alike = {(spec.start, spec.scale, spec.whole) for spec in specs if spec.sources == specs[0].sources}
        start, scale, gathered = alike.pop() if len(alike) == 1 else (0, 1, frozenset())
        placed = Placed(dim=dim, parts=parts)
        kept: dict[str, Any] = {"start": start, "scale": scale, "gathered": gathered, "axis": specs[0].axis}
        marked(one, other, placed, sources_of(specs), degree=degree, **kept)
    return share


def marked(
    share: Tensor,
    whole: Tensor,
    placed: Placed,
    sources: frozenset[str],
    *,
    degree: int,
    start: int = 0,
    scale: int = 1,
    gathered: Ranges = frozenset(),
    axis: str = TENSOR_AXIS,
) -> Tensor:
    """Mark a tensor as a local shard of one with the shape of `whole`, and return it."""
    shadow = shadow_of(whole.shape, share.dtype)
    kept: dict[str, Any] = {"start": start, "scale": scale, "whole": gathered, "axis": axis, "degree": degree}
    spec = ShardSpec(shadow=shadow, placed=placed, sources=sources, **kept)
    return attach(share, interned(spec))
