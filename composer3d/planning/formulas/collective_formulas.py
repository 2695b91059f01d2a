"""The collectives of a layout by formulas: which, how often, how large, and whether compute goes on beside them.

Sources: Samyam Rajbhandari et al., ZeRO, arXiv:1910.02054; Mohammad Shoeybi et al., Megatron-LM, arXiv:1909.08053;
Vijay Korthikanti et al., arXiv:2205.05198 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence

from composer3d.planning.formulas.decoder_dims import ModelShape
from composer3d.planning.formulas.layout_numbers import Setup
from composer3d.planning.tracing.traced import Transfer

__all__ = ["boundary", "every_microbatch", "once_a_step", "over_tensor_ranks", "wire_bytes"]

_PASSES = {"all_reduce": 2}


def wire_bytes(op: str, size: float, num_ranks: int) -> int:
    """Return what a rank sends in one collective by a ring.

    >>> wire_bytes("all_reduce", 8, 4), wire_bytes("all_gather", 8, 4)
    (12, 6)
    """
    if op == "send":
        return int(size)
    return int(_PASSES.get(op, 1) * size * (num_ranks - 1) / num_ranks)


def _transfer(
    op: str, axis: str, ranks: Sequence[int], size: float, *, count: int, dtype: str, overlapped: bool
) -> Transfer:
    return Transfer(
        op=op,
        axis=axis,
        plugin=None,
        ranks=tuple(ranks),
        dtype=dtype,
        count=count,
        bytes=int(size),
        wire_bytes=wire_bytes(op, size, len(ranks)) * count,
        is_overlapped=overlapped,
    )


def over_tensor_ranks(shape: ModelShape, setup: Setup, num_layers: int, *, backward: bool) -> list[Transfer]:
    """Return the collectives of tp in a stage's forward or backward: two all-reduces a layer, or their halves."""
    transfers: list[Transfer] = []
    size = setup.precision.compute_bytes * setup.tokens * shape.hidden
    runs = 2 if backward and setup.recompute == "full" else 1
    if setup.tp > 1:
        ranks = setup.ranks("tp")
        ops = ("all_gather", "reduce_scatter") if setup.sequence_parallel else ("all_reduce",)
        for op in ops:
            count = 2 * num_layers * runs
            hidden = setup.async_tp and backward
            transfers.append(
                _transfer(op, "tp", ranks, size, count=count, dtype=setup.precision.dtype, overlapped=hidden)
            )
    if setup.cp > 1:
        keys = setup.precision.compute_bytes * setup.microbatch * setup.seq_len
        keys *= 2 * shape.num_kv_heads * shape.head_dim / setup.tp
        ops = ("all_gather", "reduce_scatter") if backward else ("all_gather",)
        for op in ops:
            transfers.append(
                _transfer(
                    op, "cp", setup.ranks("cp"), keys, count=num_layers, dtype=setup.precision.dtype, overlapped=False
                )
            )
    return transfers


def boundary(shape: ModelShape, setup: Setup, stage: int, direction: int) -> list[Transfer]:
    """Return the message of a micro-batch's hidden state to the next stage (+1), or of its gradient back (-1)."""
    if setup.pp == 1 or not 0 <= stage + direction < setup.num_stages:
        return []
    cut = setup.tp if setup.sequence_parallel else 1
    size = setup.precision.compute_bytes * setup.tokens * shape.hidden / cut
    ranks = setup.ranks("pp")[:2]
    return [_transfer("send", "pp", ranks, size, count=1, dtype=setup.precision.dtype, overlapped=setup.async_messages)]


def _shard_axis(setup: Setup) -> tuple[str, tuple[int, ...]]:
    """Return the axis over which parameters are sharded, context ranks included, and its ranks."""
    if setup.cp == 1:
        return "dp_shard", setup.ranks("dp_shard")
    return "dp_shard+cp", tuple(range(0, setup.dp_shard * setup.cp * setup.tp, setup.tp))


def every_microbatch(setup: Setup, share: tuple[float, float], num_layers: int, *, backward: bool) -> list[Transfer]:
    """Return what sharding sends in every forward or backward.

    Args:
        setup: The layout.
        share: Parameters of the stage's blocks, and of its embedding and head, before sharding.
        num_layers: Of the stage.
        backward: Which of the two.
    """
    axis, ranks = _shard_axis(setup)
    if setup.zero < 2 or len(ranks) == 1:
        return []
    precision, layers = setup.precision, max(num_layers, 1)
    transfers = []
    if not backward or setup.zero == 3:
        gathers = [(share[0] / layers, layers)] + ([(share[1], 1)] if share[1] and not backward else [])
        transfers += [
            _transfer(
                "all_gather",
                axis,
                ranks,
                size * precision.gather_bytes,
                count=count,
                dtype=precision.dtype,
                overlapped=setup.overlap,
            )
            for size, count in gathers
        ]
    if backward and setup.zero == 3:
        transfers += _reductions(setup, share[0] / layers, layers) + (_reductions(setup, share[1], 1))
    return transfers


def _reductions(setup: Setup, size: float, count: int) -> list[Transfer]:
    """Return the reduction of a unit's gradients over shards, and over copies of the shard."""
    axis, ranks = _shard_axis(setup)
    total = size * setup.precision.reduce_bytes
    dtype = "float32" if setup.precision.reduce_bytes == 4 else setup.precision.dtype
    found = []
    if not size:
        return []
    if setup.zero and len(ranks) > 1:
        found.append(
            _transfer("reduce_scatter", axis, ranks, total, count=count, dtype=dtype, overlapped=setup.overlap)
        )
        total /= len(ranks)
    copies = setup.ranks("dp_replicate")
    if not setup.zero:
        copies = tuple(range(0, setup.data_parallel * setup.cp * setup.tp, setup.tp))
    if len(copies) > 1:
        found.append(
            _transfer("all_reduce", "dp_replicate", copies, total, count=count, dtype=dtype, overlapped=setup.overlap)
        )
    return found


def once_a_step(setup: Setup, held: float, num_layers: int) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return what a step sends once: gathers in its first forward, reductions in its last backward.

    Args:
        setup: The layout.
        held: Parameters of the rank before sharding.
        num_layers: Of the rank.
    """
    if setup.zero == 3:
        return (), ()
    layers = max(num_layers, 1)
    axis, ranks = _shard_axis(setup)
    gathers: tuple[Transfer, ...] = ()
    if setup.zero == 1 and len(ranks) > 1:
        precision = setup.precision
        gathers = (
            _transfer(
                "all_gather",
                axis,
                ranks,
                held / layers * precision.gather_bytes,
                count=layers,
                dtype=precision.dtype,
                overlapped=setup.overlap,
            ),
        )
    return gathers, tuple(_reductions(setup, held / layers, layers))
