"""Marks that the arguments of a block have lost, and tensors that a block takes as shards and is given whole.

How many positions there are may depend on values: rows without padding, chunks that a router chose. The dry run has
none, and finds shards; in the run what was chosen is whole on every rank, and a block computes with all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation.shards import PropagationError, spec_of

__all__ = ["LostMarks"]


class LostMarks:
    """Marks what blocks are given without its mark.

    Args:
        blocks: Of the tensors that each block takes, the dims along which the dry run found them sharded, or None.
        axis: The mesh axis.
        mark: Marks a local shard along a dim.
        is_whole: Returns whether a size is that of a sequence that was marked, and of no shard.
        local_sizes: Returns the sizes of shards that were marked.
    """

    def __init__(
        self,
        blocks: Mapping[str, tuple[int | None, ...]],
        *,
        axis: str,
        mark: Callable[[Tensor, int], Tensor],
        is_whole: Callable[[int], bool],
        local_sizes: Callable[[], Collection[int]],
    ) -> None:
        self._blocks, self._axis, self._mark = blocks, axis, mark
        self._is_whole, self._local_sizes = is_whole, local_sizes
        # By block, sizes of what was whole where the dry run found shards.
        self._whole_sizes: dict[str, set[int]] = {}

    def marked_again(
        self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_inside: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a block with their marks.

        Args:
            fqn: Of the block.
            args: Of the call.
            kwargs: Of the call.
            is_inside: Whether the model's forward is at work, in which nothing loses its mark: what has none is whole.

        Raises:
            PropagationError: Whether it is whole cannot be told.
        """
        lost = self._lost(fqn, args, kwargs)
        if not lost:
            return args, kwargs
        sizes = {leaf.shape[dim] for leaf, dim in lost.values()}
        known = self._whole_sizes.get(fqn, set())
        if is_inside:
            self._whole_sizes[fqn] = known | sizes
            return args, kwargs
        if sizes <= known and sizes.isdisjoint(self._local_sizes()):
            return args, kwargs
        if doubtful := sizes & known or {size for size in sizes if self._is_whole(size)}:
            raise PropagationError(
                f'"{fqn}" is given all {min(doubtful)} positions, of which it takes shards: how many there were in '
                "between depends on values, as of repeat_interleave by a tensor; choose them by a mask that keeps "
                "their number"
            )

        def marked(leaf: Any) -> Any:
            return self._mark(leaf, lost[id(leaf)][1]) if id(leaf) in lost else leaf

        return torch_compat.tree_map(marked, (args, kwargs))

    def was_whole(self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a block that is recomputed was given all positions where the dry run found shards."""
        known = self._whole_sizes.get(fqn)
        return known is not None and any(
            leaf.shape[dim] in known for leaf, dim in self._lost(fqn, args, kwargs).values()
        )

    def _lost(self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, tuple[Tensor, int]]:
        """Return the tensors without a mark of which the dry run found shards, with their dims, by identity."""
        sharded = self._blocks.get(fqn, ())
        leaves = [leaf for leaf in torch_compat.tree_leaves([list(args), kwargs]) if isinstance(leaf, Tensor)]
        if len(leaves) != len(sharded):
            return {}
        return {
            id(leaf): (leaf, dim)
            for leaf, dim in zip(leaves, sharded, strict=True)
            if dim is not None and spec_of(leaf, self._axis) is None
        }
