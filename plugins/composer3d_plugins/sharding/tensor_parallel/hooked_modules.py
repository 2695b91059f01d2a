"""Hooks on modules whose activations sequence_parallel shards: they are given the positions of their rank."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import forward_hooks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["has_hooks", "watch_hooks"]


def has_hooks(block: nn.Module) -> bool:
    """Return whether a module, or one inside of it, has hooks that are no library's."""
    return forward_hooks.are_there(forward_hooks.tables_of(block.modules()))


def watch_hooks(model: nn.Module, sharded: Collection[str], *, degree: int) -> None:
    """Warn of hooks in blocks on a sharded sequence, once for each block, in the forward that would call them first.

    Args:
        model: A part.
        sharded: FQNs of the blocks.
        degree: Ranks along tp.
    """
    blocks = {fqn: forward_hooks.tables_of(model.get_submodule(fqn).modules()) for fqn in sharded}
    every = [table for tables in blocks.values() for table in tables]
    newest = -2

    def look(*_: Any) -> None:
        nonlocal newest
        if (found := forward_hooks.newest(every)) == newest:
            return
        newest = found
        for fqn in [fqn for fqn, tables in blocks.items() if forward_hooks.are_there(tables)]:
            del blocks[fqn]
            warnings.warn(
                f'"{fqn}" has hooks, which are given the positions of their rank, one in {degree}, with '
                "sequence_parallel: register them before compose and leave plan out, and the block's sequence stays "
                "whole; or write sequence_parallel = false",
                stacklevel=2,
            )

    if blocks:
        model.register_forward_pre_hook(look)
