"""Exchanges of sequence shards: ring messages, all-gathers, reduce-scatters, all-to-alls.

Shards may differ in length; every rank derives all lengths from `Positions`, so no sizes are exchanged. All ranks of
the group issue every call in the same order, by which gloo and NCCL pair messages: a rank that sends to an offset
receives from the opposite one in the same batch, also where both are the same rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from composer3d import torch_compat
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions, Run

__all__ = [
    "Message",
    "Outgoing",
    "Ring",
    "gather_runs",
    "heads_to_positions",
    "packed",
    "positions_to_heads",
    "return_windows",
    "scatter_runs",
    "take_windows",
    "unpacked",
]

Shapes = Sequence[Sequence[int]]


def packed(tensors: Sequence[torch.Tensor], *, size: int = 0) -> torch.Tensor:
    """Return tensors of one dtype in one flat buffer, so that they travel in one message; each is read once.

    Args:
        tensors: Of any strides.
        size: Least elements of the buffer; zeros follow the tensors.
    """
    num_elements = sum(tensor.numel() for tensor in tensors)
    flat = tensors[0].new_empty(max(size, num_elements))
    for view, tensor in zip(unpacked(flat, [tensor.shape for tensor in tensors]), tensors, strict=True):
        view.copy_(tensor)
    if size > num_elements:
        flat.narrow(0, num_elements, size - num_elements).zero_()
    return flat


def unpacked(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """Return the tensors at the front of a flat buffer as views."""
    views, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        views.append(flat.narrow(0, at, size).view(*shape))
        at += size
    return views


@dataclass(frozen=True)
class Message:
    """A message to one rank and one from another, under way.

    Args:
        works: What to wait for.
        sent: Kept until it has gone.
        received: Complete after `wait`.
        group: Process group.
        attributes: Of the span of the wait.
    """

    works: tuple[Any, ...]
    sent: torch.Tensor
    received: torch.Tensor
    group: Any
    attributes: dict[str, Any]

    def wait(self) -> torch.Tensor:
        """Wait until both have arrived; return what came."""
        with torch_compat.operator_span("wait", self.group, op="exchange", **self.attributes):
            for work in self.works:
                if self.received.device.type == "cpu":
                    torch_compat.wait_for_message(work, self.group, self.received.device)
                else:
                    work.wait()
        return self.received


class Ring:
    """Messages between ranks that are so many positions apart in their group.

    Collectives: each `post` one send and one receive; none where nothing is to be sent.
    """

    def __init__(self, group: str) -> None:
        self._group = torch_compat.process_group(group)
        self.rank, self.degree = dist.get_rank(self._group), dist.get_world_size(self._group)

    def post(self, flat: torch.Tensor, *, offset: int, num_received: int, what: str, hop: int) -> Message:
        """Start sending a flat buffer to the rank at an offset, and receiving from the one opposite.

        Args:
            flat: 1-D.
            offset: Ranks onwards; negative for back.
            num_received: Elements that come.
            what: `keys` or `gradients`, for the span.
            hop: Which message of its kind it is, from 1.
        """
        received = flat.new_empty(num_received)
        target, source = (
            dist.get_global_rank(self._group, (self.rank + step) % self.degree) for step in (offset, -offset)
        )
        operations = []
        if flat.numel():
            operations.append(dist.P2POp(dist.isend, flat, target, self._group))
        if num_received:
            operations.append(dist.P2POp(dist.irecv, received, source, self._group))
        attributes = {"bytes": flat.nbytes, "what": what, "hop": hop}
        works = tuple(dist.batch_isend_irecv(operations)) if operations else ()
        return Message(works, flat, received, self._group, attributes)


def gather_runs(tensors: Sequence[torch.Tensor], *, dim: int, positions: Positions, group: str) -> list[torch.Tensor]:
    """Return whole tensors in order of positions, of shards [..., local length, ...].

    Collectives: one all-gather of all tensors together, whose result has degree * max_local_length positions.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(shapes) > 1 and len(set(shapes)) == 1 and positions.is_even:  # in fewer operators
        every = _gathered(torch.stack(list(tensors)).view(-1), positions.degree, group)
        stacks = every.view(positions.degree, len(shapes), *shapes[0]).unbind()
        pieces = [stacks[rank].narrow(dim + 1, start, length) for rank, start, length in positions.pieces]
        # Operators that return them may not return views of one tensor.
        return [torch.cat([piece[at] for piece in pieces], dim) for at in range(len(shapes))]
    per_position = sum(math.prod(shape[:dim] + shape[dim + 1 :]) for shape in shapes)
    size = per_position * positions.max_local_length
    every = _gathered(packed(tensors, size=size), positions.degree, group)
    shards = [
        unpacked(
            every.narrow(0, rank * size, size),
            [_resized(shape, dim, positions.local_lengths[rank]) for shape in shapes],
        )
        for rank in range(positions.degree)
    ]
    return [
        torch.cat([shards[rank][at].narrow(dim, start, length) for rank, start, length in positions.pieces], dim)
        for at in range(len(tensors))
    ]


def _gathered(flat: torch.Tensor, degree: int, group: str) -> torch.Tensor:
    process_group = torch_compat.process_group(group)
    every = flat.new_empty(degree * flat.numel())
    with torch_compat.operator_span("all_gather", process_group, bytes=every.nbytes):
        torch_compat.all_gather_single(every, flat, group=process_group)
    return every


@dataclass(frozen=True)
class Outgoing:
    """Memory of every rank's shards of whole tensors, which are summed over ranks when they have been written.

    Args:
        flat: degree * max_local_length positions of all tensors.
        shapes: Of the whole tensors.
        dim: The sequence.
        positions: Of every rank.
        pieces: Of each tensor, in order of positions: the position at which a piece begins, and a view of its memory.
    """

    flat: torch.Tensor
    shapes: Shapes
    dim: int
    positions: Positions
    pieces: list[list[tuple[int, torch.Tensor]]]

    @classmethod
    def of(cls, wholes: Sequence[torch.Tensor], *, dim: int, positions: Positions, dtype: torch.dtype) -> Outgoing:
        """Return memory for tensors of these sizes."""
        shapes = [tuple(whole.shape) for whole in wholes]
        size = positions.max_local_length * sum(math.prod(shape[:dim] + shape[dim + 1 :]) for shape in shapes)
        make = wholes[0].new_empty if positions.is_even else wholes[0].new_zeros
        flat = make(positions.degree * size, dtype=dtype)
        shards = [
            unpacked(flat.narrow(0, rank * size, size), [_resized(shape, dim, length) for shape in shapes])
            for rank, length in enumerate(positions.local_lengths)
        ]
        pieces: list[list[tuple[int, torch.Tensor]]] = [[] for _ in wholes]
        start = 0
        for rank, at, length in positions.pieces:
            for each, shard in zip(pieces, shards[rank], strict=True):
                each.append((start, shard.narrow(dim, at, length)))
            start += length
        return cls(flat, shapes, dim, positions, pieces)

    def reduced(self, group: str) -> list[torch.Tensor]:
        """Return this rank's shards of the sums over ranks, views of one message.

        Collectives: one reduce-scatter of all tensors together.
        """
        process_group = torch_compat.process_group(group)
        mine = self.flat.new_empty(self.flat.numel() // self.positions.degree)
        with torch_compat.operator_span("reduce_scatter", process_group, bytes=self.flat.nbytes):
            torch_compat.reduce_scatter_single(mine, self.flat, group=process_group)
        length = self.positions.local_lengths[dist.get_rank(process_group)]
        local = [_resized(shape, self.dim, length) for shape in self.shapes]
        return unpacked(mine, local)


def scatter_runs(wholes: Sequence[torch.Tensor], *, dim: int, positions: Positions, group: str) -> list[torch.Tensor]:
    """Return this rank's shards of the sums over ranks of whole tensors: the adjoint of `gather_runs`.

    Collectives: one reduce-scatter of all tensors together.
    """
    outgoing = Outgoing.of(wholes, dim=dim, positions=positions, dtype=wholes[0].dtype)
    for whole, pieces in zip(wholes, outgoing.pieces, strict=True):
        for start, piece in pieces:
            piece.copy_(whole.narrow(dim, start, piece.shape[dim]))
    return [shard.clone() for shard in outgoing.reduced(group)]


def positions_to_heads(x_BHLE: torch.Tensor, *, positions: Positions, group: str) -> torch.Tensor:
    """Return all positions, in order, of this rank's heads [B, H / degree, S, E].

    Collectives: one all-to-all of the shard's bytes.
    """
    process_group, degree = torch_compat.process_group(group), positions.degree
    batch, heads, _, width = x_BHLE.shape
    sent = x_BHLE.unflatten(1, (degree, heads // degree)).movedim(1, 0).reshape(-1)
    sizes = [batch * (heads // degree) * length * width for length in positions.local_lengths]
    received = sent.new_empty(sum(sizes))
    with torch_compat.operator_span("all_to_all", process_group, bytes=sent.nbytes):
        dist.all_to_all_single(received, sent, sizes, [sent.numel() // degree] * degree, group=process_group)
    whole = sent.new_empty(batch, heads // degree, positions.length, width)
    local = [(batch, heads // degree, length, width) for length in positions.local_lengths]
    for runs, shard in zip(positions.runs, unpacked(received, local), strict=True):
        _copy_runs(whole, shard, dim=2, runs=runs, is_to_whole=True)
    return whole


def heads_to_positions(x_BhSE: torch.Tensor, *, positions: Positions, group: str) -> torch.Tensor:
    """Return all heads of this rank's positions [B, h * degree, L, E]: the inverse and adjoint of the other way.

    Collectives: one all-to-all of the bytes of all positions of the rank's heads.
    """
    process_group, degree = torch_compat.process_group(group), positions.degree
    batch, heads, _, width = x_BhSE.shape
    local = [(batch, heads, length, width) for length in positions.local_lengths]
    sent = x_BhSE.new_empty(x_BhSE.numel())
    for runs, shard in zip(positions.runs, unpacked(sent, local), strict=True):
        _copy_runs(x_BhSE, shard, dim=2, runs=runs, is_to_whole=False)
    length = positions.local_lengths[dist.get_rank(process_group)]
    received = sent.new_empty(degree * batch * heads * length * width)
    sizes = [math.prod(shape) for shape in local]
    with torch_compat.operator_span("all_to_all", process_group, bytes=sent.nbytes):
        dist.all_to_all_single(received, sent, [received.numel() // degree] * degree, sizes, group=process_group)
    return (
        received.view(degree, batch, heads, length, width).movedim(0, 1).reshape(batch, degree * heads, length, width)
    )


def take_windows(
    x: torch.Tensor, *, dim: int, positions: Positions, windows: Sequence[tuple[Run, ...]], group: str
) -> torch.Tensor:
    """Return what lies in this rank's windows, one after another; zeros beyond both ends of the sequence.

    Collectives: one all-to-all of what windows have of other ranks' shards.

    Args:
        x: This rank's shard.
        dim: The sequence.
        positions: Of every rank's shard.
        windows: By rank, half-open runs of positions, which may overlap and reach beyond the sequence.
        group: Name of the process group.
    """
    process_group = torch_compat.process_group(group)
    rank = dist.get_rank(process_group)
    taken = [_pieces(positions.runs[rank], each) for each in windows]
    sent = [
        [] if other == rank else [x.narrow(dim, piece.at, piece.size) for piece in pieces]
        for other, pieces in enumerate(taken)
    ]
    result = x.new_zeros(_resized(x.shape, dim, sum(end - start for start, end in windows[rank])))
    wanted = [_pieces(runs, windows[rank]) for runs in positions.runs]
    places = [[result.narrow(dim, piece.place, piece.size) for piece in pieces] for pieces in wanted]
    for piece in taken[rank]:
        result.narrow(dim, piece.place, piece.size).copy_(x.narrow(dim, piece.at, piece.size))
    received = _exchanged_pieces(sent, [[] if o == rank else each for o, each in enumerate(places)], x, process_group)
    for views, shards in zip(places, received, strict=True):
        for view, shard in zip(views, shards, strict=False):
            view.copy_(shard)
    return result


def return_windows(
    gradient: torch.Tensor, *, dim: int, positions: Positions, windows: Sequence[tuple[Run, ...]], group: str
) -> torch.Tensor:
    """Return the gradient of a rank's shard, of those of all windows: the adjoint of `take_windows`.

    Collectives: one all-to-all, as large.
    """
    process_group = torch_compat.process_group(group)
    rank = dist.get_rank(process_group)
    wanted = [_pieces(runs, windows[rank]) for runs in positions.runs]
    sent = [
        [] if other == rank else [gradient.narrow(dim, piece.place, piece.size) for piece in pieces]
        for other, pieces in enumerate(wanted)
    ]
    result = gradient.new_zeros(_resized(gradient.shape, dim, positions.local_lengths[rank]))
    taken = [_pieces(positions.runs[rank], each) for each in windows]
    places = [[result.narrow(dim, piece.at, piece.size) for piece in pieces] for pieces in taken]
    for piece in taken[rank]:
        result.narrow(dim, piece.at, piece.size).add_(gradient.narrow(dim, piece.place, piece.size))
    others = [[] if other == rank else each for other, each in enumerate(places)]
    received = _exchanged_pieces(sent, others, gradient, process_group)
    for views, shards in zip(places, received, strict=True):
        for view, shard in zip(views, shards, strict=False):
            view.add_(shard)
    return result


@dataclass(frozen=True)
class _Piece:
    """Part of a window that lies in a shard.

    Args:
        at: Where it begins in the shard.
        place: Where it begins in the windows, one after another.
        size: Positions.
    """

    at: int
    place: int
    size: int


def _pieces(runs: Sequence[Run], windows: Sequence[Run]) -> list[_Piece]:
    found, place = [], 0
    for first, last in windows:
        at = 0
        for start, end in runs:
            low, high = max(first, start), min(last, end)
            if low < high:
                found.append(_Piece(at + low - start, place + low - first, high - low))
            at += end - start
        place += last - first
    return found


def _exchanged_pieces(
    sent: Sequence[Sequence[torch.Tensor]], wanted: Sequence[Sequence[torch.Tensor]], like: torch.Tensor, group: Any
) -> list[list[torch.Tensor]]:
    """Return the pieces that come from each rank, of the shapes of those that are wanted."""
    flat = packed([piece for pieces in sent for piece in pieces] or [like.new_empty(0)])
    shapes = [[tuple(piece.shape) for piece in pieces] for pieces in wanted]
    sizes = [sum(map(math.prod, each)) for each in shapes]
    received = flat.new_empty(sum(sizes))
    splits = [sum(piece.numel() for piece in pieces) for pieces in sent]
    with torch_compat.operator_span("all_to_all", group, bytes=flat.nbytes):
        dist.all_to_all_single(received, flat, sizes, splits, group=group)
    return [unpacked(part, each) for part, each in zip(received.split(sizes), shapes, strict=True)]


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _copy_runs(whole: torch.Tensor, shard: torch.Tensor, *, dim: int, runs: Sequence[Run], is_to_whole: bool) -> None:
    at = 0
    for start, end in runs:
        of_whole, of_shard = whole.narrow(dim, start, end - start), shard.narrow(dim, at, end - start)
        if is_to_whole:
            of_whole.copy_(of_shard)
        else:
            of_shard.copy_(of_whole)
        at += end - start
