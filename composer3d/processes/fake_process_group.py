"""Fake process group: one rank of a world of any size, whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from composer3d.errors import RankError
from composer3d.torch_compat import (
    clear_sharding_caches,
    dispatch_mode,
    fake_group,
    is_wrapper_subclass,
    start_autograd,
)

__all__ = ["fake_world", "zeros_from_others"]

_UNWRITTEN = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
# Functional collectives that make their result; the others begin with this rank's own values.
_MAKING = ("_c10d_functional::all_gather", "_c10d_functional::all_to_all", "_c10d_functional::reduce_scatter")


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of a world whose other ranks do not exist; 16384 ranks cost no more than one.

    Collectives of torch's `fake` backend return at once and leave whatever lay in their results: shapes, placements
    and counts are those of the real world, values are not.

    Args:
        world_size: Ranks of the world.
        rank: The one to be.

    Raises:
        RankError: There is a process group already, or the world does not have that rank.

    Memory: the rank's own shards. Collectives: none.

    >>> import torch.distributed as dist
    >>> with fake_world(512, rank=3):
    ...     dist.get_world_size(), dist.get_rank()
    (512, 3)
    """
    import torch.distributed as dist

    if not 0 <= rank < world_size:
        raise RankError(f"a world of {world_size} ranks has no rank {rank}; its ranks are 0 to {world_size - 1}")
    if dist.is_initialized():
        raise RankError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, as of a composition that is "
            "open, and a fake process group cannot be made beside that one; write run.close() first, or "
            "torch.distributed.destroy_process_group()"
        )
    # Of an earlier world of this process too: torch remembers results by meshes that are equal, with their groups.
    clear_sharding_caches()
    start_autograd()  # before DTensor makes fake tensors, so that ranks may be forked from this process later
    try:
        with fake_group(world_size, rank):
            yield
    finally:
        clear_sharding_caches()


@contextmanager
def zeros_from_others() -> Iterator[None]:
    """Let a fake group's other ranks send zeros where their values would be whatever lay in memory.

    Of what a rank receives into memory of its own before, nothing changes. Steps with values can be repeated then: a
    recomputation that receives other values than its forward chooses other experts, and other shapes with them.

    Memory: none. Collectives: none; modes that count them are entered inside.

    >>> import torch
    >>> with fake_world(2), zeros_from_others():
    ...     torch.empty(2)
    tensor([0., 0.])
    """
    import torch

    def handle(operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(is_wrapper_subclass(cls) for cls in types):
            return NotImplemented
        result = operator(*args, **kwargs)
        name = operator.name().partition(".")[0]
        if name in _UNWRITTEN or name.startswith(_MAKING):
            for tensor in (result,) if isinstance(result, torch.Tensor) else result:
                tensor.zero_()
        return result

    with dispatch_mode(handle):
        yield
