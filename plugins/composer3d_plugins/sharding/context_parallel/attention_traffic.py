"""Bytes that sharded attention exchanges, by formula: what `count_collectives` counts of one attention and one rank.

Letters: B batch, H heads of queries, K heads of keys and values, E head dim, F head dim of values, cp ranks, u ranks of
a usp's inner group, R = cp / u of its ring, L = S / cp and M = T / cp positions of a rank, b bytes of an element, w of
an accumulated one: 4, or 8 for float64. For equal shards:

| method | forward | backward |
|---|---|---|
| gather | all-gather cp M B K (E + F) b | the same, reduce-scatter cp M B K (E + F) w |
| ring | cp - 1 messages of M B K (E + F) b | the same, cp messages of M B K (E + F) w |
| ulysses | all-to-alls of L B H E b, 2 x M B K' E b, L B H F b; K' key heads, repeated to a multiple of cp | the same |
| usp | all-to-alls as ulysses; R - 1 messages of u M B K' / u (E + F) b | the same, R messages with w |
| universal | all-gathers cp M B K E b, cp M B K F b | reduce-scatters of as many elements, w each |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from composer3d_plugins.sharding.context_parallel.attention_blocks import hops
from composer3d_plugins.sharding.context_parallel.attention_methods import Method, head_repeats
from composer3d_plugins.sharding.context_parallel.attention_pattern import Pattern
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions

__all__ = ["AttentionShape", "Exchange", "Layout", "exchanges", "held_bytes", "moved_bytes", "saved_bytes"]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of an attention on one rank, but for its positions; heads are those of the rank.

    Args:
        batch: Samples.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values.
        head_dim: Of queries and keys.
        value_dim: Elements of a value, a head.
        element_bytes: Of queries, keys, values.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    element_bytes: int

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of an element of accumulated results: float32, or the dtype where it is wider."""
        return max(4, self.element_bytes)

    @property
    def kv_elements(self) -> int:
        """Elements of keys and values at one position."""
        return self.batch * self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Placement of an attention's positions on ranks.

    Args:
        rows: Positions of queries.
        columns: Positions of keys.
        pattern: Visibility by position.
        inner_degree: Ranks that exchange heads; usp only.
    """

    rows: Positions
    columns: Positions
    pattern: Pattern = Pattern()
    inner_degree: int = 1


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective, or one message sent and one received.

    Args:
        op: all_gather, reduce_scatter, all_to_all, send.
        over: Ranks that take part: `cp`, or `inner` or `outer` of usp.
        degree: How many they are.
        bytes: Payload as `composer3d.testing.Collective.bytes`.
        in_backward: Whether the backward issues it.
    """

    op: str
    over: str
    degree: int
    bytes: int
    in_backward: bool


def exchanges(method: Method, shape: AttentionShape, layout: Layout, *, rank: int) -> list[Exchange]:
    """Return what one rank exchanges for one attention, forward and backward.

    Every `send` stands for a receive too, whose bytes differ from it where shards are uneven.
    """
    if method is Method.ULYSSES:
        return list(_exchanged(shape, layout, rank=rank, inner_degree=layout.rows.degree))
    if method is Method.USP:
        return list(_exchanged(shape, layout, rank=rank, inner_degree=layout.inner_degree))
    if method is Method.RING:
        return list(_ring(shape, layout, rank=rank, over="cp"))
    degree, positions = layout.columns.degree, layout.columns.degree * layout.columns.max_local_length
    each = [shape.batch * shape.num_kv_heads * dim for dim in (shape.head_dim, shape.value_dim)]
    if method in (Method.GATHER, Method.GATHER_ONCE):
        gathers, again, reduced = [sum(each)], [sum(each)] if method is Method.GATHER else [], [sum(each)]
    else:
        gathers, again, reduced = each, [], each
    cost = [("all_gather", n * shape.element_bytes, False) for n in gathers]
    cost += [("all_gather", n * shape.element_bytes, True) for n in again]
    cost += [("reduce_scatter", n * shape.accumulated_bytes, True) for n in reduced]
    return [
        Exchange(op=op, over="cp", degree=degree, bytes=positions * size, in_backward=in_backward)
        for op, size, in_backward in cost
    ]


def _ring(shape: AttentionShape, layout: Layout, *, rank: int, over: str) -> Iterator[Exchange]:
    way, lengths = hops(layout.rows, layout.columns, layout.pattern), layout.columns.local_lengths
    degree = len(lengths)

    def sent(source: int, size: int, *, in_backward: bool) -> Exchange:
        num_bytes = shape.kv_elements * lengths[source % degree] * size
        return Exchange(op="send", over=over, degree=degree, bytes=num_bytes, in_backward=in_backward)

    for in_backward in (False, True):
        for hop in range(way.onwards):
            yield sent(rank - hop, shape.element_bytes, in_backward=in_backward)
        for hop in range(way.back):
            yield sent(rank + hop, shape.element_bytes, in_backward=in_backward)
    # Gradients: onwards with the own part, back from the first rank after it; of each the last message goes home.
    for hop in range(way.onwards + 1 if way.onwards else 0):
        yield sent(rank - hop, shape.accumulated_bytes, in_backward=True)
    for hop in range(way.back):
        yield sent(rank + hop + 1, shape.accumulated_bytes, in_backward=True)


def _exchanged(shape: AttentionShape, layout: Layout, *, rank: int, inner_degree: int) -> Iterator[Exchange]:
    repeats = head_repeats(shape.num_heads, shape.num_kv_heads, inner_degree)
    num_kv_heads, first = shape.num_kv_heads * repeats, rank - rank % inner_degree
    over = "cp" if inner_degree == layout.rows.degree else "inner"
    # To heads a rank sends its positions of all heads; to positions all positions of its heads.
    for in_backward in (False, True):
        for positions, heads, dim, to_heads in (
            (layout.rows, shape.num_heads, shape.head_dim, True),
            (layout.columns, num_kv_heads, shape.head_dim, True),
            (layout.columns, num_kv_heads, shape.value_dim, True),
            (layout.rows, shape.num_heads, shape.value_dim, False),
        ):
            lengths = positions.local_lengths
            all_positions = sum(lengths[first : first + inner_degree])
            sent = heads * lengths[rank] if to_heads != in_backward else heads // inner_degree * all_positions
            num_bytes = shape.batch * sent * dim * shape.element_bytes
            yield Exchange(op="all_to_all", over=over, degree=inner_degree, bytes=num_bytes, in_backward=in_backward)
    if inner_degree < layout.rows.degree:
        local = replace(shape, num_heads=shape.num_heads // inner_degree, num_kv_heads=num_kv_heads // inner_degree)
        grouped = replace(layout, rows=layout.rows.grouped(inner_degree), columns=layout.columns.grouped(inner_degree))
        yield from _ring(local, grouped, rank=rank // inner_degree, over="outer")


def moved_bytes(exchange: Exchange) -> float:
    """Return what a rank sends: all of a message, and of a collective all but its own part."""
    return exchange.bytes if exchange.op == "send" else exchange.bytes * (exchange.degree - 1) / exchange.degree


def saved_bytes(method: Method, shape: AttentionShape, layout: Layout, *, rank: int) -> int:
    """Return the bytes that an attention keeps for its backward: queries, keys, values, output, and log-sum-exp.

    With equal shards and `gather`, `ring`, `ulysses` or `usp` that is 1 / cp of what one device keeps, key heads that
    are repeated aside; `gather_once` and `universal` keep all keys and values.
    """
    inner = {Method.ULYSSES: layout.rows.degree, Method.USP: layout.inner_degree}.get(method, 1)
    first = rank - rank % inner
    num_rows, num_columns = (
        sum(positions.local_lengths[first : first + inner]) for positions in (layout.rows, layout.columns)
    )
    repeats = head_repeats(shape.num_heads, shape.num_kv_heads, inner)
    if method in (Method.GATHER_ONCE, Method.UNIVERSAL):
        num_columns = layout.columns.length
    heads, kv_elements = shape.batch * shape.num_heads // inner, shape.kv_elements * repeats // inner
    wide = heads * num_rows * (shape.head_dim + shape.value_dim) + kv_elements * num_columns
    return wide * shape.element_bytes + heads * num_rows * shape.accumulated_bytes


def held_bytes(method: Method, shape: AttentionShape, layout: Layout) -> int:
    """Return the bytes of keys and values that a rank holds at once in the forward, its own included."""
    own = layout.columns.max_local_length * shape.kv_elements * shape.element_bytes
    if method in (Method.GATHER, Method.GATHER_ONCE, Method.UNIVERSAL):
        return own * layout.columns.degree
    if method is Method.ULYSSES:
        repeats = head_repeats(shape.num_heads, shape.num_kv_heads, layout.columns.degree)
        return own * repeats
    if method is Method.USP:
        return 3 * own * head_repeats(shape.num_heads, shape.num_kv_heads, layout.inner_degree)
    way = hops(layout.rows, layout.columns, layout.pattern)
    return own * (1 + 2 * ((way.onwards > 0) + (way.back > 0)))
