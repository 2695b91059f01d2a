"""Traced optimizer step of one rank: memory, operators and collectives, without any time.

The tracer fills these; the time model, the lint, the search and the reports read nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "DISK_READ",
    "DISK_WRITE",
    "DISPATCH",
    "FROM_DEVICE",
    "HOST_COPY",
    "IN_HOST",
    "TO_DEVICE",
    "WAITED_COPY",
    "Memory",
    "Operators",
    "RankTrace",
    "Segment",
    "SegmentKind",
    "Transfer",
]

DISPATCH = "dtensor.dispatch"  # the name of what the host does for an operator on DTensors
# Names of copies between a device and its host: on streams of their own in any direction, or in one of two at the same
# time; and those for which the device, or the host, waits.
HOST_COPY = "host_copy"
TO_DEVICE, FROM_DEVICE, WAITED_COPY = f"{HOST_COPY}.to_device", f"{HOST_COPY}.from_device", f"{HOST_COPY}.waited"
DISK_READ, DISK_WRITE = "disk.read", "disk.write"  # beside all else, in blocks
IN_HOST = "host."  # begins the names of operators that the host computes in its own memory
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
        axis: Mesh axis, several joined by `+`; None for one that belongs to no axis.
        plugin: Name of the plugin that issued it; None for the core.
        ranks: Global ranks that take part.
        dtype: Of the elements.
        count: Number of them.
        bytes: The whole buffer of one: of an all-reduce, the gathered result, the input of a reduce-scatter, the
            message.
        wire_bytes: Bytes that this rank sends in all of them together, by a ring.
        is_overlapped: Whether compute goes on beside it; False where the next operator waits for it.
        backend: That a plugin states for its axis; None is the device's own.
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
    backend: str | None = None


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a step: an action of the pipeline, or without one the forward and backward of a micro-batch.

    Args:
        kind: Kind of action; `gradients` follows the last backward: reductions, norm, clipping.
        stage: Pipeline stage; 0 without a pipeline.
        count: Number of identical repetitions in the step, one for each micro-batch.
        operators: Of one repetition.
        transfers: Of one repetition.
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
        parameters: Local shards, throughout the step.
        gradients: At the end of the last backward.
        optimizer: After the step.
        activations: Most bytes saved for backward.
        transient: The rest at the peak: gathered parameters, communication buffers, temporaries.
        peak: Most bytes alive at any moment.
        moment: Time of the peak: a segment's kind, with stage and micro-batch where there are several.
        module: The FQN of the module that ran then; empty outside of modules.
        buffers: Registered buffers.
        activations_at_peak: Of the peak, bytes made in forwards.
        gradients_at_peak: Of the peak, gradients. With these two, parameters, optimizer, buffers, averages and
            transient add up to the peak.
        num_storages: Live storages at the peak.
        host: Most bytes that plugins keep in host memory, of an accelerator's; none of them is in the others.
        averages: Moving averages of the parameters, throughout the step.
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
    host: int = 0
    averages: int = 0


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's step.

    Args:
        rank: Global rank.
        coordinates: Index by axis.
        stands_for: Number of ranks of the world that it represents, itself included.
        segments: In order of first appearance.
        is_extrapolated: Whether repeated blocks were traced at two depths only.
        notes: Caveats for the reader: emulated plugins, assumptions.
    """

    rank: int
    coordinates: Mapping[str, int]
    stands_for: int
    memory: Memory
    segments: tuple[Segment, ...]
    is_extrapolated: bool
    notes: tuple[str, ...] = ()
