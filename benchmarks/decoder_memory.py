"""A rank's memory by formulas: states, activations in flight, logits, what is gathered; the peak is the worst moment.

Sources: Samyam Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3; Vijay Korthikanti et al., arXiv:2205.05198;
Deepak Narayanan et al., arXiv:2104.04473 (micro-batches in flight); torch's FSDP2 (units gathered ahead).
"""

from __future__ import annotations

from decoder_block import block, embedding, head
from decoder_shape import ModelShape

from composer3d.planning.formulas.layout_numbers import Setup, in_flight, state_bytes
from composer3d.planning.tracing.traced import Memory

__all__ = ["memory_of"]


def memory_of(shape: ModelShape, setup: Setup, pp_rank: int, held: tuple[float, float], num_layers: int) -> Memory:
    """Return the memory of a pipeline rank.

    Args:
        shape: Of the model.
        setup: The layout.
        pp_rank: Position along pp.
        held: Parameters before sharding: all of them, and of those embedding and head.
        num_layers: Of the rank.
    """
    degree = setup.dp_shard * setup.cp
    stage = 3 if setup.zero and setup.shards_weights else setup.zero
    states = dict(state_bytes(held[0], degree, stage, setup.precision))
    if setup.offload:
        states["optimizer"] = 0.0
    flights = in_flight(setup, pp_rank)
    kept, working = _activations(shape, setup, num_layers)
    activations = flights * kept
    has_head = pp_rank == (0 if setup.schedule in ("ZBVZeroBubble", "DualPipeV") else setup.pp - 1)
    if pp_rank == 0:
        activations += flights * embedding(shape, setup).saved_bytes
    gathered = _gathered(setup, held, num_layers)
    moments = {
        "backward": states["gradients"] + activations + working + gathered,
        "optimizer": states["gradients"] + _optimizer_temporaries(setup, held[0], degree),
    }
    if has_head:
        late = states["gradients"] if setup.num_microbatches > 1 or setup.zero < 2 else 0.0
        loss = head(shape, setup)
        moments["loss"] = late + activations + loss.saved_bytes + loss.working_bytes + gathered / 2
    moment = max(moments, key=lambda name: moments[name])
    base = states["parameters"] + states["optimizer"] + setup.extra_bytes
    peak = base + moments[moment]
    return Memory(
        parameters=int(states["parameters"]),
        gradients=int(states["gradients"]),
        optimizer=int(states["optimizer"]),
        activations=int(activations),
        transient=max(0, int(peak - base - states["gradients"] - activations)),
        peak=int(peak),
        moment=moment,
        module="",
    )


def _activations(shape: ModelShape, setup: Setup, num_layers: int) -> tuple[float, float]:
    """Return what a micro-batch keeps in a rank's blocks, and the working set of the block at work."""
    layer = block(shape, setup)
    if setup.recompute == "none":
        return num_layers * layer.saved_bytes, layer.working_bytes
    cut = setup.tp if setup.sequence_parallel else 1
    if setup.recompute == "full":
        kept = setup.precision.compute_bytes * setup.tokens * shape.hidden / cut
        return num_layers * kept, layer.saved_bytes + layer.working_bytes
    kept = layer.selective_bytes
    if setup.attention == "math":
        scores = setup.precision.compute_bytes * setup.microbatch * 2.5 * shape.num_heads / setup.tp
        kept = layer.saved_bytes - scores * setup.seq_len**2 / setup.cp
    return num_layers * kept, layer.saved_bytes - kept + layer.working_bytes


def _gathered(setup: Setup, held: tuple[float, float], num_layers: int) -> float:
    """Return parameters and gradients that are whole for a while: two units and the root, or all below stage 3."""
    precision = setup.precision
    if setup.dp_shard * setup.cp == 1 or not setup.zero:
        return held[0] * precision.compute_bytes if precision.param_bytes > precision.compute_bytes else 0.0
    if setup.zero < 3 or setup.pp > 1:  # torch's schedules reduce gradients, and free parameters, after the last one
        if setup.shards_weights:  # weights as they compute, and gradients that micro-batches add up
            return held[0] * (precision.compute_bytes + precision.reduce_bytes)
        return held[0] * precision.compute_bytes if precision.param_bytes > precision.compute_bytes else 0.0
    unit = (held[0] - held[1]) / max(num_layers, 1)
    reduced = unit * (precision.compute_bytes + precision.reduce_bytes)
    return 2 * unit * precision.gather_bytes + held[1] * precision.compute_bytes + reduced


def _optimizer_temporaries(setup: Setup, held: float, degree: int) -> float:
    """Return a list of updates as long as the shard, which an optimizer over lists of tensors makes."""
    return held * setup.precision.param_bytes / (degree if setup.zero else 1)
