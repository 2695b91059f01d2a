"""The choice between methods of attention, by what each exchanges and holds; with its figures.

Without figures of the links the method that moves fewest bytes is chosen, but none that holds several times what a
rank's own queries, keys, values and outputs take. With them it is the one with the least time that no block hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from composer3d_plugins.sharding.context_parallel.attention_methods import Method, inner_degrees, unfit
from composer3d_plugins.sharding.context_parallel.attention_traffic import (
    AttentionShape,
    Exchange,
    Layout,
    exchanges,
    held_bytes,
    moved_bytes,
)

if TYPE_CHECKING:
    from composer3d.planning.hardware import Hardware

__all__ = ["Choice", "Link", "MethodFigures", "choose", "link_of"]

# Gathered keys and values may take so many times what a rank's own queries, keys, values and outputs take.
_MAX_HELD = 4.0
# A backward multiplies five matrices where a forward multiplies two.
_FORWARD_AND_BACKWARD = 3.5


@dataclass(frozen=True, kw_only=True)
class Link:
    """Figures of the ranks that share a sequence.

    Args:
        bytes_per_s: That a rank sends.
        latency_s: Of one message.
        flops_per_s: That a rank computes in attention; None for unknown, then nothing hides messages.
    """

    bytes_per_s: float
    latency_s: float
    flops_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class MethodFigures:
    """Costs of one attention on a rank, forward and backward.

    Args:
        num_collectives: Collectives and messages.
        moved_bytes: That the rank sends.
        held_bytes: Of keys and values at once, its own included.
        exposed_s: Time that no block hides; None without figures of the links.
        unfit: Why it is not possible; None where it is.
        inner_degree: Of usp.
    """

    num_collectives: int = 0
    moved_bytes: int = 0
    held_bytes: int = 0
    exposed_s: float | None = None
    unfit: str | None = None
    inner_degree: int = 1


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A method, why, and what all of them cost."""

    method: Method
    reason: str
    figures: Mapping[Method, MethodFigures]

    @property
    def inner_degree(self) -> int:
        """Ranks that exchange heads; 1 but for usp."""
        return self.figures[self.method].inner_degree


def link_of(hardware: Hardware, *, ranks: Sequence[int], dtype: str) -> Link:
    """Return the figures of a described cluster for ranks that share a sequence.

    Args:
        hardware: The cluster.
        ranks: Of the world; those of one node are linked inside of it.
        dtype: Of attention, such as `bfloat16`.
    """
    nodes = {rank // hardware.devices_per_node for rank in ranks}
    link = hardware.intra if len(nodes) == 1 else hardware.inter
    peak = hardware.device.peaks.get(dtype)
    return Link(
        bytes_per_s=link.reached,
        latency_s=link.latency_s + link.base_s,
        flops_per_s=None if peak is None else peak * hardware.device.attention_efficiency,
    )


METHODS = (Method.GATHER, Method.RING, Method.ULYSSES, Method.USP, Method.UNIVERSAL)


def choose(
    shape: AttentionShape,
    layout: Layout,
    *,
    link: Link | None = None,
    needs_autograd: str = "",
    methods: Sequence[Method] = METHODS,
) -> Choice:
    """Return the method for one attention; a pure function, the same on all ranks.

    Args:
        shape: Sizes.
        layout: Positions; an `inner_degree` above 1 is the only one that usp may have.
        link: Figures of the links, where there are any.
        needs_autograd: What has to be computed by torch's own function, see `unfit`.
        methods: Those that there are; usp needs process groups of its own.
    """
    figures = {method: _figures(method, shape, layout, link, needs_autograd) for method in methods}
    own = _own_bytes(shape, layout)
    possible = [method for method, found in figures.items() if found.unfit is None]
    if not needs_autograd and len(possible) > 1:
        possible = [method for method in possible if method is not Method.UNIVERSAL]  # more bytes than gather
    lean = [method for method in possible if figures[method].held_bytes <= _MAX_HELD * own]
    if link is not None:
        method = min(lean or possible, key=lambda each: (figures[each].exposed_s, list(Method).index(each)))
        reason = f"{_microseconds(figures[method])} of exchanges that no block hides"
    else:
        method = min(lean or possible, key=lambda each: (figures[each].moved_bytes, list(Method).index(each)))
        reason = f"{figures[method].moved_bytes:,} bytes sent an attention, the fewest"
    others = ", ".join(f"{each} {_cost(figures[each], link)}" for each in possible if each is not method)
    return Choice(method=method, reason=f"{reason} ({others})" if others else reason, figures=figures)


def _figures(
    method: Method, shape: AttentionShape, layout: Layout, link: Link | None, needs_autograd: str
) -> MethodFigures:
    degree, given = layout.rows.degree, layout.inner_degree if layout.inner_degree > 1 else None
    why = unfit(method, num_heads=shape.num_heads, degree=degree, inner_degree=given, needs_autograd=needs_autograd)
    if why is not None:
        return MethodFigures(unfit=why)
    if method is not Method.USP:
        return _counted(method, shape, layout, link)
    each = [
        _counted(method, shape, replace(layout, inner_degree=inner), link)
        for inner in ([given] if given else inner_degrees(shape.num_heads, degree))
    ]
    return min(each, key=lambda found: found.moved_bytes if found.exposed_s is None else found.exposed_s)


def _counted(method: Method, shape: AttentionShape, layout: Layout, link: Link | None) -> MethodFigures:
    ranks = [exchanges(method, shape, layout, rank=rank) for rank in range(layout.rows.degree)]
    most = max(ranks, key=lambda rows: sum(map(moved_bytes, rows)))
    return MethodFigures(
        num_collectives=len(most),
        moved_bytes=int(sum(map(moved_bytes, most))),
        held_bytes=held_bytes(method, shape, layout),
        exposed_s=None if link is None else _exposed(most, shape, layout, link),
        inner_degree=layout.inner_degree if method is Method.USP else 1,
    )


def _exposed(rows: list[Exchange], shape: AttentionShape, layout: Layout, link: Link) -> float:
    collectives = [row for row in rows if row.op != "send"]
    messages = [row for row in rows if row.op == "send"]
    waited = sum(link.latency_s * (row.degree - 1) + moved_bytes(row) / link.bytes_per_s for row in collectives)
    sent = sum(link.latency_s + row.bytes / link.bytes_per_s for row in messages)
    if not messages or link.flops_per_s is None:
        return waited + sent
    degree = messages[0].degree
    # Behind the last block nothing is under way but gradients.
    hiding = _flops(shape, layout) / link.flops_per_s * (degree - 1) / degree
    return waited + max(sent - hiding, len(messages) * link.latency_s / degree)


def _flops(shape: AttentionShape, layout: Layout) -> float:
    rows, columns = layout.rows.max_local_length, layout.columns.length
    seen: float = min(layout.pattern.window or columns, columns)
    if layout.pattern.ahead == 0 and layout.pattern.behind is None:
        seen = columns / 2
    products = shape.batch * shape.num_heads * rows * seen * (shape.head_dim + shape.value_dim)
    return 2 * products * _FORWARD_AND_BACKWARD


def _own_bytes(shape: AttentionShape, layout: Layout) -> float:
    queries = layout.rows.max_local_length * shape.batch * shape.num_heads * (shape.head_dim + shape.value_dim)
    return (queries + layout.columns.max_local_length * shape.kv_elements) * shape.element_bytes


def _cost(figures: MethodFigures, link: Link | None) -> str:
    return f"{figures.moved_bytes:,}" if link is None else _microseconds(figures)


def _microseconds(figures: MethodFigures) -> str:
    return f"{(figures.exposed_s or 0.0) * 1e6:.0f} us"
