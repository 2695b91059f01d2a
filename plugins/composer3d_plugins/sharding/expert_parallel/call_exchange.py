"""Exchange of the rows that a block's code calls experts with, which may be of several sizes: rows of each, in turn.

A row is what is exchanged as one: elements of one dim, or a sample of two dims and more for what relates these.

Shape suffixes: R rows, D width, E what is called, of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from composer3d import map_tensors, torch_compat
from composer3d_plugins.sharding.expert_parallel.token_exchange import evenly

__all__ = ["Calls", "by_rank", "exchange_calls", "is_exchangeable", "tied"]

_COUNT, _WIDTH = 32, 28  # bits
_NEW, _WAITS = 1 << (_COUNT + _WIDTH), 1 << (_COUNT + _WIDTH + 1)
_DIM, _DIMS = 20, 3  # bits of a dim of a sample, and how many dims it may have


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Numbers of rows that are sent and received in one exchange.

    Args:
        chosen: Rows of this rank for everything that is called, of all ranks.
        sizes: Of one of those rows.
        sent: Elements to each rank.
        received: By source rank, rows and the sizes of one for each of this rank's.
        is_called: Whether any rank's code has called it, of each of this rank's.
        are_new: Whether any rank sends anything.
        wait: Whether any rank has calls left, with rows that are made of results.
    """

    chosen: list[int]
    sizes: list[tuple[int, ...]]
    sent: list[int]
    received: list[list[tuple[int, tuple[int, ...]]]]
    is_called: list[bool]
    are_new: bool
    wait: bool


def exchange_calls(
    rows: Sequence[int | None],
    sizes: Sequence[tuple[int, ...]],
    *,
    are_samples: bool,
    waits: bool,
    group: Any,
    peers: Any,
    device: torch.device,
    parts: Sequence[int],
    skew: float,
) -> Calls:
    """Tell every rank how many rows of which sizes come for each that its ranks call.

    Fake tensors have no values: there all of a part get the same number of rows, and this rank's `skew` times as many.

    Args:
        rows: Of each that is called, of all ranks; None for one that this rank's code has not called.
        sizes: Of one of those rows, that `is_exchangeable`; none where there are none.
        are_samples: Whether rows may be samples, on any rank.
        waits: Whether this rank has calls left, with rows that are made of results.
        group: Process group of ep.
        peers: Process group of those that gather the same experts; None where nobody does.
        device: Of rows.
        parts: Numbers of consecutive ones that are routed to as one list, of a rank.
        skew: As of `token_exchange.exchange_counts`.

    Collectives: one all-to-all of E int64, of 2E with samples; with peers one all-reduce of two.
    """
    degree, is_new = dist.get_world_size(group), any(count is not None for count in rows)
    local = len(rows) // degree
    words = _words(rows, sizes, first=(_NEW if is_new else 0) | (_WAITS if waits else 0), local=local)
    if are_samples:
        dims = list(map(_packed, sizes))
        words = [word for at in range(0, len(words), local) for part in (words, dims) for word in part[at : at + local]]
    words_E = torch.tensor(words, device=device, dtype=torch.int64)
    received_E = words_E.clone()  # a fake process group leaves it as it is
    with torch_compat.operator_span("all_to_all", group, bytes=words_E.nbytes, what="counts"):
        dist.all_to_all_single(received_E, words_E, group=group)
    if torch_compat.active_fake_mode() is not None:
        rank = dist.get_rank(group)
        return _assumed(rows, sizes, waits=waits, rank=rank, degree=degree, parts=parts, skew=skew)
    told = received_E.view(degree, -1).tolist()  # one wait for the accelerator
    flags = [any(words[0] & _NEW for words in told), any(words[0] & _WAITS for words in told)]
    flags = flags if peers is None else _agreed(flags, peers, device)
    counts = [[word & ((1 << _COUNT) - 1) for word in words[:local]] for words in told]
    wide = [[(word >> _COUNT) & ((1 << _WIDTH) - 1) for word in words[:local]] for words in told]
    packed = [words[local:] or [0] * local for words in told]
    return Calls(
        chosen=[n or 0 for n in rows],
        sizes=list(sizes),
        sent=by_rank([(n or 0) * math.prod(of_row) for n, of_row in zip(rows, sizes, strict=True)], degree),
        received=[
            [(max(0, n - 1), _unpacked(dims) or (width,)) for n, width, dims in zip(ns, ws, ds, strict=True)]
            for ns, ws, ds in zip(counts, wide, packed, strict=True)
        ],
        is_called=[max(column) > 0 for column in zip(*counts, strict=True)],
        are_new=flags[0],
        wait=flags[1],
    )


def _words(rows: Sequence[int | None], sizes: Sequence[tuple[int, ...]], *, first: int, local: int) -> list[int]:
    """Return counts and widths, with flags in the first word for each rank."""
    widths = [of_row[0] if len(of_row) == 1 else 0 for of_row in sizes]
    words = [0 if n is None else (n + 1) | (width << _COUNT) for n, width in zip(rows, widths, strict=True)]
    return [word | (0 if at % local else first) for at, word in enumerate(words)]


def _packed(sizes: tuple[int, ...]) -> int:
    return sum((size + 1) << place * _DIM for place, size in enumerate(sizes)) if len(sizes) > 1 else 0


def _unpacked(word: int) -> tuple[int, ...]:
    return tuple(part - 1 for place in range(_DIMS) if (part := word >> place * _DIM & (1 << _DIM) - 1))


def is_exchangeable(sizes: tuple[int, ...]) -> bool:
    """Return whether all of a sample's sizes can be told to another rank."""
    return len(sizes) < 2 or (len(sizes) <= _DIMS and max(sizes) + 1 < 1 << _DIM)


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
    sizes: Sequence[tuple[int, ...]],
    *,
    waits: bool,
    rank: int,
    degree: int,
    parts: Sequence[int],
    skew: float,
) -> Calls:
    """Return balanced routing: of each part, what this rank sends is divided among all of it that is called."""
    local, first, mine = sum(parts), 0, [0] * sum(parts)
    even = [0] * len(rows)
    wide: list[tuple[int, ...]] = [()] * len(rows)
    for part in parts:
        places = [of * local + first + at for of in range(degree) for at in range(part)]
        called = [place for place in places if rows[place] is not None]
        shares = evenly(sum(rows[place] or 0 for place in called), len(called)) if called else []
        for place, share in zip(called, shares, strict=True):
            even[place], wide[place] = share, sizes[place]
        held = [place for place in called if place // local == rank]
        if held:
            total = round(skew * sum(even[place] for place in held))
            for place, share in zip(held, evenly(total, len(held)), strict=True):
                mine[place - rank * local] = share
        first += part
    of_mine = wide[rank * local : (rank + 1) * local]
    return Calls(
        chosen=even,
        sizes=wide,
        sent=by_rank([n * math.prod(of_row) for n, of_row in zip(even, wide, strict=True)], degree),
        received=[list(zip(mine, of_mine, strict=True)) for _ in range(degree)],
        is_called=[True] * local,
        are_new=any(n is not None for n in rows),
        wait=waits,
    )


def tied(output: Any, tie: torch.Tensor | None) -> Any:
    """Return an output whose backward goes through an exchange of which it uses no row."""
    if tie is None:
        return output
    return map_tensors(lambda leaf: leaf + tie.sum().to(leaf.dtype) if leaf.is_floating_point() else leaf, output)
