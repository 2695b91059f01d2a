"""Collective time on a cluster, by latency and bandwidth of the links that the group uses.

A ring moves (N - 1) / N of the buffer past every rank, twice for an all-reduce; a tree moves as much in 2 log2 N steps,
which matters for small buffers only. A group that spans nodes is bound by the adapters of the ranks that it has in a
node, all of which carry a part. Source: Rolf Rabenseifner, Optimization of Collective Reduction Operations, 2004;
Sylvain Jeaugey, Massively Scale Your Deep Learning Training with NCCL 2.4 (double binary trees), 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from composer3d.planning.costs.timed import timed_collective_s
from composer3d.planning.hardware.cluster import Hardware, Link
from composer3d.planning.tracing.traced import Transfer

__all__ = ["Group", "collective_s", "group_of", "message_s", "transfer_s"]

# A protocol that writes data and flag together has a third of the latency and half of the bandwidth.
_QUICK_LATENCY, _QUICK_BANDWIDTH = 0.3, 0.5
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Placement of a group's ranks on nodes.

    Args:
        num_ranks: All of them.
        num_nodes: Nodes that hold any.
    """

    num_ranks: int
    num_nodes: int

    @property
    def per_node(self) -> int:
        """Ranks that a node holds, at least: the fewest adapters that carry what passes between nodes."""
        return max(1, self.num_ranks // self.num_nodes)


def group_of(ranks: Sequence[int], devices_per_node: int) -> Group:
    """Return how ranks lie on nodes when each node holds consecutive ones."""
    return _group_of(tuple(ranks), devices_per_node)


# A plan asks for the times of the same groups a thousand times, and the largest have all ranks of the world.
@lru_cache(maxsize=64)
def _group_of(ranks: tuple[int, ...], devices_per_node: int) -> Group:
    return Group(num_ranks=len(ranks), num_nodes=len({rank // devices_per_node for rank in ranks}))


def transfer_s(transfer: Transfer, hardware: Hardware) -> float:
    """Return the seconds of one of the equal transfers."""
    group = group_of(transfer.ranks, hardware.devices_per_node)
    if transfer.op in ("send", "receive"):
        return message_s(transfer.bytes, group, hardware)
    return collective_s(transfer.op, transfer.bytes, group, hardware)


def message_s(size: float, group: Group, hardware: Hardware) -> float:
    """Return the seconds of a message between two ranks.

    Args:
        size: Bytes.
        group: The two.
        hardware: Where.
    """
    link = hardware.inter if group.num_nodes > 1 else hardware.intra
    timed = timed_collective_s("send", size, group.num_ranks, link.timed)
    if timed is not None:
        return timed
    return link.base_s + link.latency_s + size / link.reached


def collective_s(op: str, size: float, group: Group, hardware: Hardware) -> float:
    """Return the seconds of a collective: the faster of ring and tree, of bulk and quick protocol.

    Args:
        op: As in `Transfer`.
        size: Bytes of the whole buffer: what is reduced, the gathered result, what is scattered.
        group: Who takes part.
        hardware: Where.
    """
    if group.num_ranks < 2 or size <= 0:
        return 0.0
    if group.num_nodes == 1:
        timed = timed_collective_s(op, size, group.num_ranks, hardware.intra.timed)
        if timed is not None:
            return timed
    moved = _PASSES[op] * size * (group.num_ranks - 1) / group.num_ranks
    links = _bytes_per_link(op, size, moved, group, hardware)
    base = hardware.inter.base_s if group.num_nodes > 1 else hardware.intra.base_s
    latency = min(_latencies(op, group, hardware))
    busy = max(amount / link.reached for link, amount in links)
    # A protocol that moves large pieces needs some of them under way before a link is full.
    filling = max(link.half_bytes / link.reached for link, _ in links)
    return base + min(latency + busy + filling, latency * _QUICK_LATENCY + busy / _QUICK_BANDWIDTH)


def _bytes_per_link(op: str, size: float, moved: float, group: Group, hardware: Hardware) -> list[tuple[Link, float]]:
    """Return what one rank sends over each kind of link."""
    if group.num_nodes == 1:
        return [(hardware.intra, moved)]
    outside = _PASSES[op] * size * (group.num_nodes - 1) / group.num_nodes
    if op == "all_to_all":  # every rank sends its own part to every other node itself
        return [(hardware.intra, moved - outside), (hardware.inter, outside)]
    inside = moved if group.per_node > 1 else 0.0
    return [(hardware.intra, inside), (hardware.inter, outside / group.per_node)]


def _latencies(op: str, group: Group, hardware: Hardware) -> list[float]:
    inside, outside = hardware.intra.latency_s, hardware.inter.latency_s
    hops_outside = group.num_nodes if group.num_nodes > 1 else 0
    ring = _PASSES[op] * (outside * hops_outside + inside * max(group.num_ranks - 1 - hops_outside, 0))
    if op == "all_to_all":
        return [outside * (group.num_nodes > 1) + inside]
    if op not in ("all_reduce", "broadcast"):
        return [ring]
    tree = 2 * (outside * math.log2(max(group.num_nodes, 1)) + inside * max(group.per_node - 1, 0))
    return [ring, tree]
