"""Attention of one rank's queries with all keys, block by block: keys all-gathered, or received around a ring.

Ring: the next keys and values are received while the block with the current ones is computed: each message is posted
before that block and waited for after it. Gradients of keys and values follow one step later, and return to their rank
from the last one. They are accumulated and sent in float32 or wider.

Memory: all-gather: all keys and values, and in the backward their gradients in float32. Ring: two shards of keys and
values besides the rank's own, and in the backward three shards of gradients.

Shape suffixes: B batch, H heads of queries, K heads of keys and values (H is a multiple), L queries and M keys of this
rank or of a block, E head dim of queries and keys, F head dim of values.

Source: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from composer3d import torch_compat
from composer3d_plugins.sharding.context_parallel.attention_blocks import (
    Block,
    Hops,
    bias_of,
    blocks_between,
    hops,
    seen_blocks,
)
from composer3d_plugins.sharding.context_parallel.attention_pattern import Kind, Pattern
from composer3d_plugins.sharding.context_parallel.block_kernels import (
    BlockCall,
    Gradients,
    Result,
    finite,
    kernel_for,
    merge_,
    positions_of,
)
from composer3d_plugins.sharding.context_parallel.sequence_messages import (
    Message,
    Outgoing,
    Ring,
    gather_runs,
    packed,
    unpacked,
)
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions, Run
from composer3d_plugins.sharding.context_parallel.summed_positions import (
    Sum,
    SummedPositions,
    SummedTensor,
    WrittenRuns,
    is_side_by_side,
    side_by_side,
)

__all__ = ["Sharded", "backward_gathered", "backward_ring", "forward_gathered", "forward_ring"]

_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sharded:
    """Attention whose queries are sharded over ranks.

    Args:
        rows: Positions of the queries.
        columns: Positions of the keys.
        rank: This rank's place in both.
        pattern: Visibility by position.
        scale: Factor of scores.
        softcap: c of c * tanh(score / c); 0 for none.
        group: Name of the process group; empty if this rank has all keys.
    """

    rows: Positions
    columns: Positions
    rank: int
    pattern: Pattern
    scale: float
    softcap: float
    group: str

    def has_whole_rows(self, mask: torch.Tensor | None) -> bool:
        """Return whether a mask's rows are those of the whole sequence; else they are this rank's."""
        return mask is not None and mask.shape[-2] == self.rows.length

    def blocks(self, keys: tuple[Run, ...], mask: torch.Tensor | None, device: torch.device) -> list[Block]:
        """Return the blocks of this rank's queries and of keys in which anything is visible."""
        found = blocks_between(self.rows.runs[self.rank], keys, self.pattern, mask is not None, device.type)
        return seen_blocks(found, mask, has_whole_rows=self.has_whole_rows(mask))


def forward_gathered(
    q_BHLE: torch.Tensor, shards: _Pair, mask: torch.Tensor | None, call: Sharded
) -> tuple[Result, _Pair]:
    """Return output [B, H, L, F] and log-sum-exp [B, H, L] of this rank's queries, and all keys and values.

    Collectives: one all-gather of keys and values, unless this rank has all of them.
    """
    rows, pair = _Forward(q_BHLE, shards[1].shape[-1], mask, call), _all_keys(shards, call)
    rows.add(pair, ((0, call.columns.length),))
    return rows.result(), pair


def backward_gathered(
    grad_BHLF: torch.Tensor, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], whole: Result,
    mask: torch.Tensor | None, call: Sharded, *, is_kept: bool,
) -> Gradients:  # fmt: skip
    """Return this rank's gradients.

    Args:
        grad_BHLF: Of the output.
        inputs: Queries, and shards of keys and values, or all of them.
        whole: What the forward returned.
        mask: As in the forward.
        call: As in the forward.
        is_kept: Whether keys and values are those that the forward has gathered.

    Collectives: one all-gather of keys and values, unless they are kept, and one reduce-scatter of their gradients.
    None if this rank has all keys: their gradients are then this rank's summand.
    """
    q_BHLE, *shards = inputs
    rows = _Backward(grad_BHLF, q_BHLE, whole, mask, call)
    pair, keys = (shards[0], shards[1]), ((0, call.columns.length),)
    pair = pair if is_kept else _all_keys(pair, call)
    if call.group:
        # Summed where they are sent from.
        outgoing = Outgoing.of(pair, dim=2, positions=call.columns, dtype=rows.dtype)
        k, v = (SummedPositions(pieces) for pieces in outgoing.pieces)
        rows.add(pair, keys, (k, v))
        for each in (k, v):
            each.end()
        d_k, d_v = (_own(x, shards[0].dtype) for x in outgoing.reduced(call.group))
    else:
        d_k, d_v = (x.to(shards[0].dtype) for x in rows.added(pair, keys))
    return Gradients(rows.d_q().to(q_BHLE.dtype), d_k, d_v)


def _own(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient in memory of its own: operators return such tensors, and those that came are of one message."""
    return side_by_side(gradient, dtype=dtype).copy_(gradient)


def _all_keys(pair: _Pair, call: Sharded) -> _Pair:
    if not call.group:
        return pair
    k, v = gather_runs(pair, dim=2, positions=call.columns, group=call.group)
    return k, v


def forward_ring(
    q_BHLE: torch.Tensor, k_BKME: torch.Tensor, v_BKMF: torch.Tensor, mask: torch.Tensor | None, call: Sharded
) -> Result:
    """Return output [B, H, L, F] and log-sum-exp [B, H, L] of this rank's queries.

    Collectives: degree - 1 messages of keys and values to the next rank, fewer where no rank's window needs them.
    """
    rows = _Forward(q_BHLE, v_BKMF.shape[-1], mask, call)
    for visit in _visits((k_BKME, v_BKMF), call):
        with visit.block_span():
            rows.add(visit.pair, call.columns.runs[visit.source])
    return rows.result()


def backward_ring(
    grad_BHLF: torch.Tensor, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], whole: Result,
    mask: torch.Tensor | None, call: Sharded,
) -> Gradients:  # fmt: skip
    """Return this rank's gradients.

    Collectives: the forward's messages of keys and values, and as many and one of gradients, which end where the keys
    came from.
    """
    q_BHLE, k_BKME, v_BKMF = inputs
    rows = _Backward(grad_BHLF, q_BHLE, whole, mask, call)
    home = _Homecoming((k_BKME, v_BKMF), call, rows.dtype)
    for visit in _visits((k_BKME, v_BKMF), call):
        with visit.block_span():
            flat, sums = _summed_in_message(visit.pair, rows.dtype)
            rows.add(visit.pair, call.columns.runs[visit.source], sums)
            for each in sums:
                each.end()
        home.send_on(visit, flat)
    d_k, d_v = (_own(x, q_BHLE.dtype) for x in home.result())
    return Gradients(rows.d_q().to(q_BHLE.dtype), d_k, d_v)


def _summed_in_message(pair: _Pair, dtype: torch.dtype) -> tuple[torch.Tensor, tuple[SummedPositions, SummedPositions]]:
    """Return memory of one message, and sums there of the gradients of keys and values."""
    flat = pair[0].new_empty(sum(x.numel() for x in pair), dtype=dtype)
    k, v = (SummedPositions([(0, view)]) for view in unpacked(flat, [x.shape for x in pair]))
    return flat, (k, v)


class _Forward:
    """Output and log-sum-exp of a rank's rows, as blocks are added."""

    def __init__(self, q_BHLE: torch.Tensor, width: int, mask: torch.Tensor | None, call: Sharded) -> None:
        self._q, self._mask, self._call, self._width = q_BHLE, mask, call, width
        self._dtype = torch.promote_types(q_BHLE.dtype, torch.float32)
        self._rows: Result | None = None
        self._begun = WrittenRuns()

    def add(self, pair: _Pair, keys: tuple[Run, ...]) -> None:
        """Add the blocks of some keys [B, K, M, E] and values [B, K, M, F], given their positions."""
        for block in self._call.blocks(keys, self._mask, self._q.device):
            q = positions_of(self._q, block.rows)
            k, v = (positions_of(x, block.columns) for x in pair)
            block_call = _block_call(block, self._mask, self._q, self._call)
            kernel = kernel_for(q, v, has_bias=block_call.bias is not None, softcap=block_call.softcap)
            result = kernel.forward(q, k, v, block_call)
            if self._rows is None and q is self._q and is_side_by_side(result.o_BHLF, dtype=self._dtype):
                self._rows = Result(result.o_BHLF, result.lse_BHL.to(self._dtype).contiguous())
                self._begun.write(block.rows)
                continue
            rows = self._result()
            for part, is_begun in self._begun.write(block.rows):
                inside = (part[0] - block.rows[0], part[1] - block.rows[0])
                own = Result(positions_of(result.o_BHLF, inside), positions_of(result.lse_BHL, inside))
                merge_(rows, own, part, is_first=not is_begun)

    def result(self) -> Result:
        """Return what all blocks make, the output in the dtype of the queries; 0 of rows that see nothing."""
        rows = self._result()
        for run in self._begun.left((0, self._q.shape[2])) if self._q.shape[2] else ():
            positions_of(rows.o_BHLF, run).zero_()
            positions_of(rows.lse_BHL, run).fill_(float("-inf"))
        return Result(rows.o_BHLF.to(self._q.dtype), rows.lse_BHL)

    def _result(self) -> Result:
        if self._rows is None:
            lse = self._q.new_empty(self._q.shape[:-1], dtype=self._dtype)
            self._rows = Result(side_by_side(self._q, dtype=self._dtype, width=self._width), lse)
        return self._rows


class _Backward:
    """Gradients of a rank's queries, as blocks are added."""

    def __init__(
        self, grad_BHLF: torch.Tensor, q_BHLE: torch.Tensor, whole: Result, mask: torch.Tensor | None, call: Sharded
    ) -> None:
        self._grad, self._q, self._mask, self._call = grad_BHLF, q_BHLE, mask, call
        self._whole = Result(whole.o_BHLF, finite(whole.lse_BHL))
        self.dtype = torch.promote_types(q_BHLE.dtype, torch.float32)
        self._rows = SummedTensor(q_BHLE, self.dtype)

    def d_q(self) -> torch.Tensor:
        """Return the gradient of the queries of all blocks that were added, in float32 or better."""
        return self._rows.total()

    def added(self, pair: _Pair, keys: tuple[Run, ...]) -> _Pair:
        """Add the blocks of some keys and values; return this rank's part of their gradients, in float32 or better."""
        k, v = (SummedTensor(x, self.dtype) for x in pair)
        self.add(pair, keys, (k, v))
        return k.total(), v.total()

    def add(self, pair: _Pair, keys: tuple[Run, ...], sums: tuple[Sum, Sum]) -> None:
        """Add the blocks of some keys and values, and their gradients to sums."""
        for block in self._call.blocks(keys, self._mask, self._q.device):
            q, grad, o, lse = (
                positions_of(x, block.rows) for x in (self._q, self._grad, self._whole.o_BHLF, self._whole.lse_BHL)
            )
            k, v = (positions_of(x, block.columns) for x in pair)
            block_call = _block_call(block, self._mask, self._q, self._call)
            kernel = kernel_for(q, v, has_bias=block_call.bias is not None, softcap=block_call.softcap)
            gradients = kernel.backward(grad, q, k, v, Result(o, lse), block_call)
            self._rows.add(block.rows, gradients.q_BHLE)
            sums[0].add(block.columns, gradients.k_BKME)
            sums[1].add(block.columns, gradients.v_BKMF)


def _block_call(block: Block, mask: torch.Tensor | None, q: torch.Tensor, call: Sharded) -> BlockCall:
    bias = bias_of(block, mask, call.pattern, q, has_whole_rows=call.has_whole_rows(mask))
    is_causal = block.kind is Kind.CAUSAL and bias is None
    hides_rows = block.kind is not Kind.ENDING
    return BlockCall(bias=bias, is_causal=is_causal, scale=call.scale, softcap=call.softcap, hides_rows=hides_rows)


@dataclass(frozen=True)
class _Visit:
    """Keys and values on this rank for one block.

    Args:
        source: Rank that they belong to.
        direction: 1 where they came onwards, -1 where they came back, 0 for the rank's own.
        hop: How many ranks they have come.
        pair: Keys and values.
    """

    source: int
    direction: int
    hop: int
    pair: _Pair

    def block_span(self) -> contextlib.AbstractContextManager[None]:
        """Return the span of the block that is computed with them, while the next ones are under way."""
        return torch_compat.operator_span("attention_block", None, source=self.source, hop=self.hop)


def _visits(pair: _Pair, call: Sharded) -> Iterator[_Visit]:
    """Yield the rank's own keys and values, then those that arrive; the next are under way while one is used."""
    ring, way = Ring(call.group), hops(call.rows, call.columns, call.pattern)
    distances = {1: way.onwards, -1: way.back}
    posted = {
        direction: _post_keys(ring, packed(pair), direction, 1, pair, call)
        for direction, distance in distances.items()
        if distance
    }
    yield _Visit(ring.rank, 0, 0, pair)
    for hop in range(1, max(way.onwards, way.back) + 1):
        for direction in [direction for direction in (1, -1) if hop <= distances[direction]]:
            flat = posted.pop(direction).wait()
            if hop < distances[direction]:
                posted[direction] = _post_keys(ring, flat, direction, hop + 1, pair, call)
            source = (ring.rank - direction * hop) % ring.degree
            k, v = unpacked(flat, _shapes(pair, call, source))
            yield _Visit(source, direction, hop, (k, v))


def _post_keys(ring: Ring, flat: torch.Tensor, direction: int, hop: int, pair: _Pair, call: Sharded) -> Message:
    """Send keys and values on by one rank; after it those of the rank so many hops away have come."""
    source = (ring.rank - direction * hop) % ring.degree
    return ring.post(flat, offset=direction, num_received=_size(pair, call, source), what="keys", hop=hop)


def _shapes(pair: _Pair, call: Sharded, source: int) -> list[tuple[int, ...]]:
    """Return the shapes of a rank's keys and values."""
    length = call.columns.local_lengths[source]
    return [(*x.shape[:2], length, x.shape[3]) for x in pair]


def _size(pair: _Pair, call: Sharded, source: int) -> int:
    return sum(x.shape[0] * x.shape[1] * call.columns.local_lengths[source] * x.shape[3] for x in pair)


class _Homecoming:
    """Gradients of keys and values on their way: each rank adds its part and sends them on, the last one home.

    Those that travel onwards set out with the part of the rank that they belong to; those that travel back, with that
    of the first rank after it.
    """

    def __init__(self, pair: _Pair, call: Sharded, dtype: torch.dtype) -> None:
        self._pair, self._call, self._dtype = pair, call, dtype
        self._ring = Ring(call.group)
        self._way: Hops = hops(call.rows, call.columns, call.pattern)
        self._under_way: dict[int, Message] = {}
        self._home: list[Message] = []
        self._own: torch.Tensor | None = None

    def send_on(self, visit: _Visit, flat: torch.Tensor) -> None:
        """Add the gradients of a visit, in one message, to those that came with it before, and send them on."""
        if visit.direction == 0:
            if self._way.onwards == 0:
                self._own = flat
                return
            self._under_way[1] = self._post(flat, offset=1, source=visit.source - 1, hop=1)
            return
        direction, hop = visit.direction, visit.hop
        if direction in self._under_way:
            flat += self._under_way.pop(direction).wait()
        last = self._way.onwards if direction == 1 else self._way.back
        if hop == last:
            message = self._post(flat, offset=-direction * hop, source=self._ring.rank, hop=hop + 1)
            self._home.append(message)
        else:
            source = visit.source - direction
            self._under_way[direction] = self._post(flat, offset=direction, source=source, hop=hop + 1)

    def _post(self, flat: torch.Tensor, *, offset: int, source: int, hop: int) -> Message:
        """Send gradients to the rank at an offset; those that come are of the keys of a rank."""
        num_received = _size(self._pair, self._call, source % self._ring.degree)
        return self._ring.post(flat, offset=offset, num_received=num_received, what="gradients", hop=hop)

    def result(self) -> _Pair:
        """Wait for what comes home; return the gradients of this rank's keys and values."""
        parts = [message.wait() for message in self._home] + ([self._own] if self._own is not None else [])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        d_k, d_v = unpacked(total, _shapes(self._pair, self._call, self._ring.rank))
        return d_k, d_v
