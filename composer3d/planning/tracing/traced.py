"""Traced optimizer step of one rank: memory, operators and collectives, without any time.

The tracer fills these; the time model, the lint, the search and the reports read nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["DISPATCH", "Memory", "Operators", "RankTrace", "Segment", "SegmentKind", "Transfer"]

DISPATCH = "dtensor.dispatch"  # the name of what the host does for an operator on DTensors
SegmentKind = Literal["forward", "backward", "input_backward", "weight_backward", "gradients", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Calls of one operator at equal shapes.

    Args:
        name: Of the operator, such as `aten.mm`.
        dtype: Of its floating-point inputs, as torch prints it without `torch.`.
        shapes: Of its tensor inputs, local to the rank.
        count: Calls.
        flops: Floating-point operations of one call, two for a multiplication with its addition.
        bytes_moved: Bytes that one call reads and writes at least.
    """

    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    count: int
    flops: int
    bytes_moved: int


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Equal collectives, or messages between two ranks.

    Args:
        op: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send` or `receive`.
        axis: Of the mesh, several joined by `+`; None for one that belongs to no axis.
        plugin: Whose it is; None for the core's.
        ranks: Global ranks that take part.
        dtype: Of the elements.
        count: How often.
        bytes: The whole buffer of one: what is reduced, the gathered result, what is scattered, the message.
        wire_bytes: What this rank sends in all of them together, by a ring.
        is_overlapped: Whether compute goes on beside it; False where the next operator waits for it.
    """

    op: str
    axis: str | None
    plugin: str | None
    ranks: tuple[int, ...]
    dtype: str
    count: int
    bytes: int
    wire_bytes: int
    is_overlapped: bool


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a step: an action of the pipeline, or without one the forward and backward of a micro-batch.

    Args:
        kind: What it does; `gradients` is what follows the last backward: reductions, norm, clipping.
        stage: Of the pipeline; 0 without one.
        count: How often the step repeats it with nothing changed, once for each micro-batch.
        operators: What is computed in one repetition.
        transfers: What is sent in one repetition.
    """

    kind: SegmentKind
    stage: int
    count: int
    operators: tuple[Operators, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank's storages.

    Args:
        parameters: All through the step.
        gradients: At the end of the last backward.
        optimizer: After the step.
        activations: What backward needs, at its most.
        transient: The rest at the moment of the peak: gathered parameters, buffers, temporaries.
        peak: The most at any moment.
        moment: When that is: a segment's kind, with stage and micro-batch where there are several.
        module: The FQN of the module that ran then; empty outside of modules.
        buffers: Registered buffers.
        activations_at_peak: Of the peak, what forwards made.
        gradients_at_peak: Of the peak, gradients. With these two, parameters, optimizer, buffers and transient add up
            to the peak.
        num_storages: At the peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    peak: int
    moment: str
    module: str
    buffers: int = 0
    activations_at_peak: int = 0
    gradients_at_peak: int = 0
    num_storages: int = 0


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's step.

    Args:
        rank: Global.
        coordinates: By axis.
        stands_for: How many ranks of the world do the same, this one included.
        memory: In bytes.
        segments: In order of first appearance.
        is_extrapolated: Whether repeated blocks were traced at two depths only.
        notes: What a reader has to know: plugins that were emulated, what was assumed.
    """

    rank: int
    coordinates: Mapping[str, int]
    stands_for: int
    memory: Memory
    segments: tuple[Segment, ...]
    is_extrapolated: bool
    notes: tuple[str, ...] = ()
