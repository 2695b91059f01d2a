"""World sizes that a run may have: those of `[run] nodes`, or of the entries of `[mesh] layouts`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer3d.manifest import Manifest

__all__ = ["Nodes", "node_counts", "next_smaller", "world_sizes"]

Nodes = int | str | tuple[int, ...]  # as `[run] nodes` states them

_MOST_NODES = 1 << 16


def node_counts(stated: Nodes) -> tuple[int, ...]:
    """Return the numbers of nodes that `[run] nodes` allows, ascending.

    Args:
        stated: A number, a range "2:4" with both ends, or a list.

    Raises:
        ValueError: It is none of these.

    >>> node_counts("2:4"), node_counts((4, 2)), node_counts(3)
    ((2, 3, 4), (2, 4), (3,))
    """
    if isinstance(stated, str):
        ends = re.fullmatch(r"(\d{1,6}):(\d{1,6})", stated)
        if ends is None:
            raise ValueError(f'nodes = "{stated}" is no range; write "2:4" for 2, 3 or 4 nodes, or [2, 4] for 2 or 4')
        low, high = int(ends[1]), int(ends[2])
        if low > high:
            raise ValueError(f'nodes = "{stated}" holds no number: its least is above its most; write "{high}:{low}"')
        counts: tuple[int, ...] = tuple(range(low, min(high, _MOST_NODES) + 1))
    else:
        counts = (stated,) if isinstance(stated, int) else tuple(sorted(set(stated)))
    if not counts or counts[0] < 1 or counts[-1] > _MOST_NODES:
        raise ValueError(f"nodes are counted from 1 to {_MOST_NODES}")
    return counts


def world_sizes(manifest: Manifest) -> tuple[int, ...]:
    """Return the numbers of ranks that the run may have, ascending; none where the manifest does not restrict them.

    A node has `mesh.gpus_per_node` ranks, 1 where that is not stated. Without `run.nodes` they are the entries of
    `mesh.layouts`.

    Args:
        manifest: Typed, as far as it can be.
    """
    nodes, mesh = getattr(manifest.tables.get("run"), "nodes", None), manifest.tables.get("mesh")
    if mesh is None:
        return ()
    if nodes is not None:
        return tuple(count * (mesh.gpus_per_node or 1) for count in node_counts(nodes))
    return tuple(sorted(map(int, mesh.layouts)))


def next_smaller(sizes: tuple[int, ...], size: int) -> int:
    """Return the largest of the sizes below one; itself where none is.

    >>> next_smaller((2, 3, 4), 4), next_smaller((2, 3, 4), 2), next_smaller((), 8)
    (3, 2, 8)
    """
    return max((other for other in sizes if other < size), default=size)
