"""Exchange of the rows that a block's code calls experts with, which may be of several widths: rows of each, in turn.

Shape suffixes: R rows, D width, E what is called, of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from composer3d import torch_compat
from composer3d_plugins.sharding.expert_parallel.token_exchange import evenly

__all__ = ["Calls", "by_rank", "exchange_calls"]

_COUNT, _WIDTH = 32, 28  # bits
_NEW, _WAITS = 1 << (_COUNT + _WIDTH), 1 << (_COUNT + _WIDTH + 1)


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Numbers of rows that are sent and received in one exchange.

    Args:
        chosen: Rows of this rank for everything that is called, of all ranks.
        widths: Of those rows.
        sent: Elements to each rank.
        received: By source rank, rows and their width for each of this rank's.
        is_called: Whether any rank's code has called it, of each of this rank's.
        are_new: Whether any rank sends anything.
        wait: Whether any rank has calls left, with rows that are made of results.
    """

    chosen: list[int]
    widths: list[int]
    sent: list[int]
    received: list[list[tuple[int, int]]]
    is_called: list[bool]
    are_new: bool
    wait: bool


def exchange_calls(
    rows: Sequence[int | None],
    widths: Sequence[int],
    *,
    waits: bool,
    group: Any,
    peers: Any,
    device: torch.device,
    parts: Sequence[int],
    skew: float,
) -> Calls:
    """Tell every rank how many rows of which width come for each that its ranks call.

    Fake tensors have no values: there all of a part get the same number of rows, and this rank's `skew` times as many.

    Args:
        rows: Of each that is called, of all ranks; None for one that this rank's code has not called.
        widths: Of those rows; 0 where there are none.
        waits: Whether this rank has calls left, with rows that are made of results.
        group: Process group of ep.
        peers: Process group of those that gather the same experts; None where nobody does.
        device: Of rows.
        parts: Numbers of consecutive ones that are routed to as one list, of a rank.
        skew: As of `token_exchange.exchange_counts`.

    Collectives: one all-to-all of E int64; with peers one all-reduce of two.
    """
    degree, is_new = dist.get_world_size(group), any(count is not None for count in rows)
    first = (_NEW if is_new else 0) | (_WAITS if waits else 0)
    words = [0 if n is None else (n + 1) | (width << _COUNT) for n, width in zip(rows, widths, strict=True)]
    local = len(words) // degree
    words = [word | (0 if at % local else first) for at, word in enumerate(words)]
    words_E = torch.tensor(words, device=device, dtype=torch.int64)
    received_E = words_E.clone()  # a fake process group leaves it as it is
    with torch_compat.operator_span("all_to_all", group, bytes=words_E.nbytes, what="counts"):
        dist.all_to_all_single(received_E, words_E, group=group)
    if torch_compat.active_fake_mode() is not None:
        rank = dist.get_rank(group)
        return _assumed(rows, widths, waits=waits, rank=rank, degree=degree, parts=parts, skew=skew)
    told = received_E.view(degree, -1).tolist()  # one wait for the accelerator
    flags = [any(words[0] & _NEW for words in told), any(words[0] & _WAITS for words in told)]
    flags = flags if peers is None else _agreed(flags, peers, device)
    counts = [[word & ((1 << _COUNT) - 1) for word in words] for words in told]
    wide = [[(word >> _COUNT) & ((1 << _WIDTH) - 1) for word in words] for words in told]
    numbers = [n or 0 for n in rows]
    return Calls(
        chosen=numbers,
        widths=list(widths),
        sent=by_rank([n * width for n, width in zip(numbers, widths, strict=True)], degree),
        received=[
            [(max(0, n - 1), width) for n, width in zip(ns, ws, strict=True)]
            for ns, ws in zip(counts, wide, strict=True)
        ],
        is_called=[max(column) > 0 for column in zip(*counts, strict=True)],
        are_new=flags[0],
        wait=flags[1],
    )


def _agreed(flags: Sequence[bool], peers: Any, device: torch.device) -> list[bool]:
    """Return which flags any of the ranks has set."""
    agreed = torch.tensor(flags, device=device, dtype=torch.int32)
    with torch_compat.operator_span("all_reduce", peers, bytes=agreed.nbytes, what="counts"):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=peers)
    return [bool(flag) for flag in agreed.tolist()]


def by_rank(sizes: Sequence[int], degree: int) -> list[int]:
    """Return the sums of as many consecutive sizes for each rank."""
    local = len(sizes) // degree
    return [sum(sizes[rank * local : (rank + 1) * local]) for rank in range(degree)]


def _assumed(
    rows: Sequence[int | None],
    widths: Sequence[int],
    *,
    waits: bool,
    rank: int,
    degree: int,
    parts: Sequence[int],
    skew: float,
) -> Calls:
    """Return balanced routing: of each part, what this rank sends is divided among all of it that is called."""
    local, first, mine = sum(parts), 0, [0] * sum(parts)
    even, wide = [0] * len(rows), [0] * len(rows)
    for part in parts:
        places = [of * local + first + at for of in range(degree) for at in range(part)]
        called = [place for place in places if rows[place] is not None]
        shares = evenly(sum(rows[place] or 0 for place in called), len(called)) if called else []
        for place, share in zip(called, shares, strict=True):
            even[place], wide[place] = share, widths[place]
        held = [place for place in called if place // local == rank]
        if held:
            total = round(skew * sum(even[place] for place in held))
            for place, share in zip(held, evenly(total, len(held)), strict=True):
                mine[place - rank * local] = share
        first += part
    of_mine = wide[rank * local : (rank + 1) * local]
    return Calls(
        chosen=even,
        widths=wide,
        sent=by_rank([n * width for n, width in zip(even, wide, strict=True)], degree),
        received=[list(zip(mine, of_mine, strict=True)) for _ in range(degree)],
        is_called=[True] * local,
        are_new=any(n is not None for n in rows),
        wait=waits,
    )
