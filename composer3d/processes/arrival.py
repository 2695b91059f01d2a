"""Places in the start of a run at which ranks wait for each other, and name those that do not come."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from composer3d.errors import RendezvousError

__all__ = ["await_all"]

_SHOWN = 8  # ranks that a message names


def await_all(store: Any, *, place: str, rank: int, world_size: int, timeout: timedelta) -> None:
    """Wait until all ranks have come to a place, through the store: no process group is needed.

    Args:
        store: Where ranks meet.
        place: Names it in the message, and in the store: each is waited for once a store.
        rank: This rank's, from 0.
        world_size: Number of ranks.
        timeout: After which the ranks that have not come are named.

    Raises:
        RendezvousError: Names the ranks that have not come.

    Collectives: none; a message of every rank to the store, and one look at all of them.
    """
    import torch.distributed as dist

    keys = [f"composer3d/arrived/{place}/{other}" for other in range(world_size)]
    try:
        store.set(keys[rank], "1")
        store.wait(keys, timeout)
    except (RuntimeError, dist.DistStoreError) as error:  # of which the second is a subclass, but for TCPStore's
        missing = _missing(store, keys)
        if not missing:
            raise
        raise RendezvousError(
            f"{_named(missing)} of {world_size} did not {place} within {timeout.total_seconds():g} s, and "
            f"rank {rank} waited; look at what {'it does' if len(missing) == 1 else 'they do'}, or raise the timeout"
        ) from error


def _missing(store: Any, keys: Sequence[str]) -> list[int]:
    try:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:  # the store is gone, too
        return []


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}{more}"
