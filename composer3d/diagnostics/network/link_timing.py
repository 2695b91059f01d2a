"""Round trips between the ranks of a process group, pair by pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Link", "ping", "time_links"]

_SMALL = 64  # bytes
_SWEEPS = 3  # over all pairs: what disturbs one sweep is over in another
_SMALL_TRIPS, _LARGE_TRIPS = 20, 3


@dataclass(frozen=True, kw_only=True)
class Link:
    """Two ranks of an axis, and how fast they reach each other: the fastest of all tries.

    Args:
        axis: Whose process group they met in.
        ranks: Global ranks, ascending.
        latency_s: Half a round trip of a small message.
        bytes_per_s: Of a large message, one way, without the latency.
    """

    axis: str
    ranks: tuple[int, int]
    latency_s: float
    bytes_per_s: float


def ping(tensor: torch.Tensor, peer: int, group: Any, is_first: bool) -> None:
    """Send a tensor to another rank and receive it back, or the other way round.

    Args:
        tensor: Sent, and overwritten.
        peer: The other's global rank.
        group: Process group of both.
        is_first: Whether this rank sends first.
    """
    import torch.distributed as dist

    for sends in (is_first, not is_first):
        if sends:
            dist.send(tensor, peer, group=group)
        else:
            dist.recv(tensor, peer, group=group)


def time_links(
    axis: str, group: Any, *, device: torch.device, num_bytes: int, trip: Callable[..., None] = ping
) -> list[Link]:
    """Measure this rank's links to later ranks of a group; all of its ranks call this.

    Pairs that share no rank are measured at once, as ranks are busy in a collective; a rank without a partner waits.

    Args:
        axis: Its name.
        group: Process group.
        device: Of the messages.
        num_bytes: Of a large message.
        trip: A round trip, as `ping` makes it.

    Memory: a large message. Collectives: messages alone.
    """
    import torch
    import torch.distributed as dist

    members = dist.get_process_group_ranks(group)
    me = dist.get_rank()
    sizes = ((_SMALL, _SMALL_TRIPS), (num_bytes, _LARGE_TRIPS))
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for size, _ in sizes]
    best: dict[int, list[float]] = {}
    for _ in range(_SWEEPS):
        for peer in _partners(members, me):
            for index, (message, (_, trips)) in enumerate(zip(messages, sizes, strict=True)):
                seconds = min(_trip_s(trip, message, peer, group, me < peer) for _ in range(trips))
                known = best.setdefault(peer, [float("inf")] * len(sizes))
                known[index] = min(known[index], seconds)
    return [
        Link(
            axis=axis,
            ranks=(me, peer),
            latency_s=small / 2,
            bytes_per_s=(num_bytes - _SMALL) / max((large - small) / 2, 1e-9),
        )
        for peer, (small, large) in best.items()
        if me < peer
    ]


def _trip_s(trip: Callable[..., None], message: torch.Tensor, peer: int, group: Any, is_first: bool) -> float:
    _finish(message)
    begin = time.perf_counter()
    trip(message, peer, group, is_first)
    _finish(message)
    return time.perf_counter() - begin


def _finish(message: torch.Tensor) -> None:
    import torch

    if message.device.type != "cpu":
        torch.accelerator.synchronize(message.device)


def _partners(members: list[int], me: int) -> Iterator[int]:
    """Yield whom this rank meets in each round in which all others meet somebody too: the circle method."""
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        for one, other in zip(circle[:half], reversed(circle[half:]), strict=True):
            if me in (one, other):
                peer = other if one == me else one
                if peer is not None:
                    yield peer
        circle = [circle[0], circle[-1], *circle[1:-1]]
