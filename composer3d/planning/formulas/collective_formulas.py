"""Collectives of sharded and replicated data parallelism: which, how often, how large, and what runs beside them.

Source: Samyam Rajbhandari et al., ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence

from composer3d.planning.formulas.layout_numbers import Setup
from composer3d.planning.tracing.summary import wire_bytes
from composer3d.planning.tracing.traced import Transfer

__all__ = ["every_microbatch", "once_a_step", "transfer"]


def transfer(
    op: str, axis: str, ranks: Sequence[int], size_bytes: float, *, count: int, dtype: str, overlapped: bool
) -> Transfer:
    """Return equal collectives.

    Args:
        op: As in `Transfer`.
        axis: Of the mesh.
        ranks: That take part.
        size_bytes: Of the whole buffer of one.
        count: Number of them.
        dtype: Of the elements.
        overlapped: Whether compute goes on beside them.
    """
    return Transfer(
        op=op,
        axis=axis,
        plugin=None,
        ranks=tuple(ranks),
        dtype=dtype,
        count=count,
        bytes=int(size_bytes),
        wire_bytes=wire_bytes(op, int(size_bytes), len(ranks)) * count,
        is_overlapped=overlapped,
    )


def _shard_axis(setup: Setup) -> tuple[str, tuple[int, ...]]:
    """Return the axis over which parameters are sharded, context ranks included, and its ranks."""
    if setup.cp == 1:
        return "dp_shard", setup.ranks("dp_shard")
    return "dp_shard+cp", tuple(range(0, setup.dp_shard * setup.cp * setup.tp, setup.tp))


def every_microbatch(
    setup: Setup, num_elements: tuple[float, float], num_layers: int, *, backward: bool
) -> list[Transfer]:
    """Return what sharding sends in every forward or backward.

    Args:
        setup: The layout.
        num_elements: Parameters of the stage's blocks, and of its embedding and head, before sharding.
        num_layers: Of the stage.
        backward: Which of the two.
    """
    ranks = _shard_axis(setup)[1]
    if setup.zero < 2 or len(ranks) == 1:
        return []
    layers, (in_blocks, outside) = max(num_layers, 1), num_elements
    transfers = []
    if not backward or setup.zero == 3:
        transfers.append(_gather(setup, in_blocks / layers, layers))
        if outside and not backward:
            transfers.append(_gather(setup, outside, 1))
    if backward and setup.zero == 3:
        transfers += _reductions(setup, in_blocks / layers, layers) + _reductions(setup, outside, 1)
    return transfers


def _gather(setup: Setup, num_elements: float, count: int) -> Transfer:
    """Return the all-gather of a unit's parameters."""
    axis, ranks = _shard_axis(setup)
    size_bytes = num_elements * setup.precision.gather_bytes
    dtype = setup.precision.dtype
    return transfer("all_gather", axis, ranks, size_bytes, count=count, dtype=dtype, overlapped=setup.overlap)


def _reductions(setup: Setup, num_elements: float, count: int) -> list[Transfer]:
    """Return the reduction of a unit's gradients over shards, and over replicas of the shard."""
    if not num_elements:
        return []
    axis, ranks = _shard_axis(setup)
    size_bytes = num_elements * setup.precision.reduce_bytes
    dtype = "float32" if setup.precision.reduce_bytes == 4 else setup.precision.dtype
    found = []
    if setup.zero and len(ranks) > 1:
        found.append(
            transfer("reduce_scatter", axis, ranks, size_bytes, count=count, dtype=dtype, overlapped=setup.overlap)
        )
        size_bytes /= len(ranks)
    axis, replicas = "dp_replicate", setup.ranks("dp_replicate")
    if not setup.zero:
        replicas = tuple(range(0, setup.data_parallel * setup.cp * setup.tp, setup.tp))
    if len(replicas) > 1:
        found.append(
            transfer("all_reduce", axis, replicas, size_bytes, count=count, dtype=dtype, overlapped=setup.overlap)
        )
    return found


def once_a_step(
    setup: Setup, num_elements: float, num_layers: int
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return what a step sends once: gathers in its first forward, reductions in its last backward.

    Args:
        setup: The layout.
        num_elements: Parameters of the rank before sharding.
        num_layers: Of the rank.
    """
    if setup.zero == 3:
        return (), ()
    layers = max(num_layers, 1)
    is_gathered = setup.zero == 1 and len(_shard_axis(setup)[1]) > 1
    gathers = (_gather(setup, num_elements / layers, layers),) if is_gathered else ()
    return gathers, tuple(_reductions(setup, num_elements / layers, layers))
