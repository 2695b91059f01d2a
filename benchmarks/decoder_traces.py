"""A step's trace from sizes and degrees alone: of published runs, which have no manifest to trace.

What is exact in a trace is a formula here: activations of a decoder's block, units gathered, collectives by count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decoder_block import Work, block, embedding, head
from decoder_memory import memory_of
from decoder_shape import ModelShape

from composer3d.planning.formulas.collective_formulas import every_microbatch, once_a_step, transfer
from composer3d.planning.formulas.layout_numbers import Setup, layers_of
from composer3d.planning.tracing.traced import HOST_COPY, Operators, RankTrace, Segment, Transfer

__all__ = ["parameters_of", "peak_bytes", "static_traces"]


def static_traces(shape: ModelShape, setup: Setup) -> tuple[RankTrace, ...]:
    """Return the traces of a layout's kinds of rank: without a pipeline one; else its first, an inner and its last.

    Args:
        shape: Of the model.
        setup: The layout; it is not checked.
    """
    if setup.pp == 1:
        return (_trace(shape, setup, 0, setup.world_size),)
    share = setup.world_size // setup.pp
    inner = ((1, share * (setup.pp - 2)),) if setup.pp > 2 else ()
    chosen = ((0, share), *inner, (setup.pp - 1, share))
    return tuple(_trace(shape, setup, rank, stands_for) for rank, stands_for in chosen)


def peak_bytes(shape: ModelShape, setup: Setup) -> int:
    """Return the peak of the worst pipeline rank, without the rest of its trace."""
    layers = layers_of(shape.num_layers, setup)
    ranks = {0, setup.pp - 1}
    return max(
        memory_of(
            shape,
            setup,
            rank,
            parameters_of(shape, setup, rank),
            sum(layers[stage] for stage in range(setup.num_stages) if stage % setup.pp == rank),
        ).peak
        for rank in ranks
    )


def parameters_of(shape: ModelShape, setup: Setup, pp_rank: int) -> tuple[float, float]:
    """Return the parameters of a pipeline rank, sharded over tp: all of them, and of those the embedding and head."""
    stages = [stage for stage in range(setup.num_stages) if stage % setup.pp == pp_rank]
    layers = sum(layers_of(shape.num_layers, setup)[stage] for stage in stages)
    outer = 0.0
    if 0 in stages:
        outer += shape.embedding_parameters
    if setup.num_stages - 1 in stages and not (shape.tied and setup.pp == 1):
        outer += shape.head_parameters
    norms = shape.layer_vectors * layers
    cut = (layers * shape.layer_parameters - norms + outer) / setup.tp
    return cut + norms, outer / setup.tp


def _trace(shape: ModelShape, setup: Setup, pp_rank: int, stands_for: int) -> RankTrace:
    held = parameters_of(shape, setup, pp_rank)
    layers = layers_of(shape.num_layers, setup)
    stages = [stage for stage in range(setup.num_stages) if stage % setup.pp == pp_rank]
    segments = [segment for stage in stages for segment in _stage_segments(shape, setup, stage, layers[stage], held)]
    segments += _after(setup, held, sum(layers[stage] for stage in stages))
    strides = setup.world_size // setup.pp
    return RankTrace(
        rank=pp_rank * strides,
        coordinates={
            "pp": pp_rank,
            **{axis: 0 for axis in ("dp_replicate", "dp_shard", "cp", "tp")},
        },
        stands_for=stands_for,
        memory=memory_of(shape, setup, pp_rank, held, sum(layers[stage] for stage in stages)),
        segments=tuple(segments),
        is_extrapolated=True,
    )


def _stage_segments(
    shape: ModelShape, setup: Setup, stage: int, num_layers: int, held: tuple[float, float]
) -> list[Segment]:
    """Return a stage's forward and backward."""
    layer = block(shape, setup)
    outer = [embedding(shape, setup)] if stage == 0 else []
    if stage == setup.num_stages - 1:
        outer.append(head(shape, setup))
    forward = [*_times(layer.forward, num_layers), *(call for work in outer for call in work.forward)]
    again = _times(recomputed(layer, setup), num_layers)
    backward = [*again, *_times(layer.backward, num_layers), *(call for work in outer for call in work.backward)]
    share = _share(held, setup)
    ahead = [*over_tensor_ranks(shape, setup, num_layers, backward=False), *boundary(shape, setup, stage, +1)]
    behind = [*over_tensor_ranks(shape, setup, num_layers, backward=True), *boundary(shape, setup, stage, -1)]
    ahead += every_microbatch(setup, share, num_layers, backward=False)
    behind += every_microbatch(setup, share, num_layers, backward=True)
    count = setup.num_microbatches
    first, last = ((), ()) if setup.pp > 1 or not setup.overlap else once_a_step(setup, held[0], num_layers)
    return [
        *_split("forward", stage, count, forward, ahead, first),
        *_split("backward", stage, count, backward, behind, last),
    ]


def recomputed(layer: Work, setup: Setup) -> tuple[Operators, ...]:
    """Return what of a block's forward its backward runs again."""
    if setup.recompute == "none":
        return ()
    if setup.recompute == "full":
        return layer.forward
    if setup.attention == "math":  # the scores only: they are most of what is kept and cheap to compute
        return tuple(call for call in layer.forward if call.name != "aten.mm")
    products = [call for call in layer.forward if call.name == "aten.mm"]
    return (*products[1::2], *(call for call in layer.forward if call.name == "aten.pointwise"))


def _times(calls: Sequence[Operators], count: int) -> list[Operators]:
    return [replace(call, count=call.count * count) for call in calls]


def _share(held: tuple[float, float], setup: Setup) -> tuple[float, float]:
    """Return the parameters of a stage's blocks and of its embedding and head, where a rank has several stages."""
    return (held[0] - held[1]) / setup.stages_per_rank, held[1] / setup.stages_per_rank


def _split(
    kind: str,
    stage: int,
    count: int,
    operators: Sequence[Operators],
    transfers: Sequence[Transfer],
    once: Sequence[Transfer],
) -> list[Segment]:
    """Return equal repetitions, and by itself the one in which collectives run that a step has once."""
    whole = Segment(
        kind="forward" if kind == "forward" else "backward",
        stage=stage,
        count=count,
        operators=tuple(operators),
        transfers=tuple(transfers),
    )
    if not once:
        return [whole]
    special = replace(whole, count=1, transfers=(*transfers, *once))
    return [replace(whole, count=count - 1), special] if count > 1 else [special]


def _after(setup: Setup, held: tuple[float, float], num_layers: int) -> list[Segment]:
    """Return what follows the last backward: reductions that nothing hid, and the optimizer."""
    first, last = once_a_step(setup, held[0], num_layers) if setup.pp > 1 or not setup.overlap else ((), ())
    late = tuple(replace(transfer, is_overlapped=False) for transfer in (*first, *last))
    stepped = held[0] / (setup.dp_shard * setup.cp if setup.zero else 1)
    precision = setup.precision
    size = 2 * precision.param_bytes + precision.grad_bytes + 2 * precision.state_bytes + 2 * precision.master_bytes
    calls = [
        Operators(
            name="aten._fused_adamw_",
            dtype="float32",
            shapes=((int(stepped),),),
            count=1,
            flops=0,
            bytes_moved=int(stepped * size),
        )
    ]
    if setup.offload:
        moved = int(2 * stepped * (precision.state_bytes + precision.master_bytes))
        calls.append(replace(calls[0], name=HOST_COPY, bytes_moved=moved))
    return [
        Segment(kind="gradients", stage=0, count=1, operators=(), transfers=late),
        Segment(kind="optimizer", stage=0, count=1, operators=tuple(calls), transfers=()),
    ]


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
                transfer(op, "tp", ranks, size, count=count, dtype=setup.precision.dtype, overlapped=hidden)
            )
    if setup.cp > 1:
        keys = setup.precision.compute_bytes * setup.microbatch * setup.seq_len
        keys *= 2 * shape.num_kv_heads * shape.head_dim / setup.tp
        ops = ("all_gather", "reduce_scatter") if backward else ("all_gather",)
        for op in ops:
            transfers.append(
                transfer(
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
    return [transfer("send", "pp", ranks, size, count=1, dtype=setup.precision.dtype, overlapped=setup.async_messages)]
