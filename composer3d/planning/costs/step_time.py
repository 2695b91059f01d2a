"""Time of the segments of a traced step: compute, and the communication that compute does not hide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from composer3d.planning.costs.collective_time import group_of, transfer_s
from composer3d.planning.costs.offload_time import copied_s, disk_s, host_s, is_of_device, is_offloaded, waited_s
from composer3d.planning.costs.roofline import operator_s
from composer3d.planning.costs.timed import fresh_s
from composer3d.planning.hardware.cluster import Device, Hardware
from composer3d.planning.tracing.traced import DISPATCH, Operators, Segment, Transfer

__all__ = [
    "AFTER",
    "Communication",
    "SegmentTime",
    "beside_compute",
    "communication_of",
    "compute_s",
    "kernels_s",
    "launches_s",
    "segment_time",
]

_MESSAGES = ("send", "receive")
AFTER = ("gradients", "optimizer")  # segments that are not the model's
_TENSORS = "tp"
_STAGES = "pp"  # whose messages the simulation of the pipeline places; those of a ring run beside its blocks


@dataclass(frozen=True, kw_only=True)
class SegmentTime:
    """Seconds of one repetition of a segment.

    Args:
        compute_s: Operators alone.
        communication_s: All collectives, one after the other.
        exposed_s: What they lengthen the segment by: those that block, and of the others what compute does not cover.
        flops: That operators execute, recomputation included.
    """

    compute_s: float
    communication_s: float
    exposed_s: float
    flops: float

    @property
    def total_s(self) -> float:
        """From the segment's begin to its end."""
        return self.compute_s + self.exposed_s

    @classmethod
    def sum_of(cls, parts: Iterable[tuple[float, SegmentTime]]) -> SegmentTime:
        """Return the sum of several, each a number of times."""
        rows = list(parts)
        return cls(
            compute_s=math.fsum(number * time.compute_s for number, time in rows),
            communication_s=math.fsum(number * time.communication_s for number, time in rows),
            exposed_s=math.fsum(number * time.exposed_s for number, time in rows),
            flops=math.fsum(number * time.flops for number, time in rows),
        )


@dataclass(frozen=True, kw_only=True)
class Communication:
    """One kind of collective over a whole step of one rank.

    Args:
        op: As in `Transfer`.
        axis: Of the mesh.
        plugin: Whose.
        link: Over which it goes.
        num_ranks: Of a group.
        count: How often.
        wire_bytes: What the rank sends.
        seconds: Of all of them.
        blocking_s: Of those, seconds in which the rank waits; the others pass beside compute.
    """

    op: str
    axis: str | None
    plugin: str | None
    link: str
    num_ranks: int
    count: int
    wire_bytes: int
    seconds: float
    blocking_s: float


def segment_time(segment: Segment, hardware: Hardware) -> SegmentTime:
    """Time one repetition of a segment on one rank.

    Messages between stages are left to the simulation of the pipeline; one that its sender waits for also takes the
    sender's time. Collectives that run beside compute share a link, and lengthen what they run beside; the first of a
    kind has nothing to run beside. On a CPU none runs beside anything.

    Args:
        segment: Of a trace.
        hardware: On which it runs.
    """
    compute = compute_s(segment.operators, hardware, is_model=segment.kind not in AFTER)
    flops = math.fsum(float(operators.flops) * operators.count for operators in segment.operators)
    return beside_compute(segment.transfers, hardware, compute_s=compute, flops=flops)


def beside_compute(
    transfers: Sequence[Transfer], hardware: Hardware, *, compute_s: float, flops: float = 0.0
) -> SegmentTime:
    """Time transfers and a compute of known length that runs beside them; see `segment_time`.

    Args:
        transfers: Of one repetition.
        hardware: On which they run.
        compute_s: Seconds of the operators alone.
        flops: That these execute.
    """
    collectives = [t for t in transfers if t.op not in _MESSAGES or (t.op == "send" and t.axis != _STAGES)]
    waited = [t for t in transfers if not t.is_overlapped and t.op != "receive"]
    blocking = sum(_waited_s(transfer, hardware) for transfer in waited)
    beside = [transfer for transfer in collectives if transfer.is_overlapped]
    by_link: dict[bool, float] = {}
    for transfer in beside:
        spans = group_of(transfer.ranks, hardware.devices_per_node).num_nodes > 1
        by_link[spans] = by_link.get(spans, 0.0) + _all_s(transfer, hardware)
    return SegmentTime(
        compute_s=compute_s,
        communication_s=blocking + sum(by_link.values()),
        exposed_s=blocking + _exposed_s(by_link, beside, compute_s, hardware),
        flops=flops,
    )


def _exposed_s(by_link: Mapping[bool, float], beside: Sequence[Transfer], compute: float, hardware: Hardware) -> float:
    """Return what collectives that run beside compute lengthen it by."""
    if not hardware.device.is_asynchronous:
        # One thread computes and waits, and what a backend's threads do beside it takes the cores from compute.
        return sum(by_link.values())
    longest = max(by_link.values(), default=0.0)
    hidden = min(longest, compute)
    first = max((_all_s(transfer, hardware) / transfer.count for transfer in beside), default=0.0)
    never = (1 - hardware.software.hidden) * longest
    return max(longest - compute, min(first, longest), never) + (hardware.slowdown - 1) * hidden


def compute_s(operators: Sequence[Operators], hardware: Hardware, *, is_model: bool = True) -> float:
    """Return the seconds of operators on one device: their own time, or where it is longer that of launching them.

    What the host computes is waited for. A drive reads and writes beside all of it.

    Args:
        operators: Of a stretch.
        hardware: On which they run.
        is_model: Whether they are the model's, which its stack fuses, and not the optimizer's.
    """
    kernels = kernels_s(operators, hardware, is_model=is_model)
    launches = launches_s(operators, hardware, is_model=is_model)
    own = max(kernels, launches) if hardware.device.is_asynchronous else kernels + launches
    return max(own + host_s(operators, hardware), disk_s(operators, hardware))


def kernels_s(operators: Sequence[Operators], hardware: Hardware, *, is_model: bool = True) -> float:
    """Return the seconds of operators without what the host does for them, or itself.

    Copies between the device and its host run on streams of their own, beside the others, but for those that are waited
    for.
    """
    fused = hardware.software.pointwise if is_model else 1.0
    work = math.fsum(
        operator_s(call, hardware.device) * call.count * (1.0 if call.flops else fused)
        for call in operators
        if is_of_device(call)
    )
    own = work + fresh_s(operators, hardware.device) + waited_s(operators, hardware)
    return max(own, copied_s(operators, hardware))


def launches_s(operators: Sequence[Operators], hardware: Hardware, *, is_model: bool = True) -> float:
    """Return the seconds of what the host does for operators."""
    fused = hardware.software.launches if is_model else 1.0
    return fused * math.fsum(
        _host_s(call, hardware.device) * call.count for call in operators if not is_offloaded(call)
    )


def _host_s(operators: Operators, device: Device) -> float:
    """Return what a call takes of the host: its launch, and what is known of hooks and dispatch around it."""
    launch = 0.0 if operators.name == DISPATCH else device.launch_s
    return launch + device.overheads.get(operators.name.split(".")[0], 0.0)


def communication_of(segments: Sequence[Segment], hardware: Hardware) -> tuple[Communication, ...]:
    """Return a rank's communication over a step, by operation, axis and plugin, the longest first."""
    sums: dict[tuple[str, str | None, str | None, str, int], tuple[int, int, float, float]] = {}
    for segment in segments:
        for transfer in segment.transfers:
            spans = group_of(transfer.ranks, hardware.devices_per_node).num_nodes > 1
            link = hardware.inter.name if spans else hardware.intra.name
            key = (transfer.op, transfer.axis, transfer.plugin, link, len(transfer.ranks))
            count, wire, seconds, blocking = sums.get(key, (0, 0, 0.0, 0.0))
            spent = _all_s(transfer, hardware) * segment.count
            sums[key] = (
                count + transfer.count * segment.count,
                wire + transfer.wire_bytes * segment.count,
                seconds + spent,
                blocking + (0.0 if transfer.is_overlapped else spent),
            )
    rows = [
        Communication(
            op=op,
            axis=axis,
            plugin=plugin,
            link=link,
            num_ranks=num_ranks,
            count=count,
            wire_bytes=wire,
            seconds=seconds,
            blocking_s=blocking,
        )
        for (op, axis, plugin, link, num_ranks), (count, wire, seconds, blocking) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _all_s(transfer: Transfer, hardware: Hardware) -> float:
    return transfer_s(transfer, hardware) * transfer.count


def _waited_s(transfer: Transfer, hardware: Hardware) -> float:
    """Return the seconds of transfers that compute waits for, without what a stack runs beside the products."""
    stack = hardware.software
    seconds = _all_s(transfer, hardware) + stack.wait_s * transfer.count
    return seconds * (1 - stack.tp_overlap) if transfer.axis == _TENSORS else seconds
