"""From bytes that are asked for to bytes that a GPU must have: rounding, fragments, and what no tensor holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from composer3d.planning.costs.figure import Figure
from composer3d.planning.hardware.cluster import Device
from composer3d.planning.tracing.traced import RankTrace, Transfer

__all__ = ["Allocation", "Verdict", "allocate", "judge", "memory_figures", "reserved_bytes"]

Verdict = Literal["fits", "tight", "does not fit"]

_BLOCK = 512  # CUDA's caching allocator rounds every request up to it
_SEGMENT = 2 << 20  # what it takes from the device in, small requests together
# Held by the driver and cuBLAS before a tensor exists; 0.5 to 1 GiB on A100 and H100, by libraries loaded. Assumed.
_CONTEXT = 800 << 20
# Of blocks that are free and fit nothing; published runs reserve 6 to 16 % above what they allocate. Assumed.
_FRAGMENTS = 0.08
# NCCL's buffers of one communicator and rank: 2 directions, a few channels of 4 MiB and less; assumed.
_COMMUNICATOR = 64 << 20
# Above this share of the device the assumptions decide.
_TIGHT = 0.92
# How far off figures may be. Traced ones are those of CPU kernels to the byte; what a GPU's keep besides is assumed. Of
# reserved memory nine of ten published runs are nearer (benchmarks/plan_accuracy.py). Contexts are 0.5 to 1 GiB.
_TRACED_BAND, _RESERVED_BAND, _ASSUMED_BAND = 0.03, 0.08, 0.5
_COUNTED = ("parameters", "gradients", "optimizer", "buffers")
_MOMENTS = ("activations", "peak", "transient", "activations_at_peak", "gradients_at_peak", "host")


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Bytes of one rank on a GPU.

    Args:
        allocated: The traced peak, every storage rounded up to blocks of the allocator.
        reserved: What the caching allocator holds then: with fragments, in whole segments.
        context: Of the driver and its libraries.
        communicators: Buffers of the process groups.
    """

    allocated: int
    reserved: int
    context: int
    communicators: int

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        return self.reserved + self.context + self.communicators


def allocate(trace: RankTrace, device: Device | None = None) -> Allocation:
    """Return what a rank needs of a GPU's memory.

    Args:
        trace: Of the rank.
        device: Whose reserve and context to take, communicators within it; None takes assumptions for any.
    """
    peak = trace.memory.peak
    allocated = peak + _BLOCK // 2 * trace.memory.num_storages
    factor = 1 + _FRAGMENTS if device is None else device.reserve_factor
    reserved = -(-int(allocated * factor) // _SEGMENT) * _SEGMENT
    if device is not None:
        return Allocation(allocated=allocated, reserved=reserved, context=device.context_bytes, communicators=0)
    groups = {transfer.ranks for transfer in _transfers(trace) if len(transfer.ranks) > 1}
    return Allocation(
        allocated=allocated, reserved=reserved, context=_CONTEXT, communicators=_COMMUNICATOR * len(groups)
    )


def reserved_bytes(allocated: float, device: Device) -> float:
    """Return what a described device shows as used: allocated bytes, what its allocator adds, and the context."""
    return allocated * device.reserve_factor + device.context_bytes


def _transfers(trace: RankTrace) -> Sequence[Transfer]:
    return [transfer for segment in trace.segments for transfer in segment.transfers]


def judge(allocation: Allocation, memory_bytes: int) -> Verdict:
    """Say whether a rank fits on a device; `tight` is what the assumptions leave open.

    Args:
        allocation: Of the rank.
        memory_bytes: Of the device.
    """
    if allocation.total > memory_bytes:
        return "does not fit"
    return "tight" if allocation.total > _TIGHT * memory_bytes else "fits"


def memory_figures(trace: RankTrace, allocation: Allocation) -> dict[str, Figure]:
    """Return a rank's bytes with how each figure is known, and between which bounds it lies.

    Args:
        trace: Of the rank.
        allocation: From `allocate`.
    """
    memory = trace.memory
    found = {name: Figure.exact(getattr(memory, name)) for name in _COUNTED}
    found |= {"averages": Figure.exact(memory.averages)} if memory.averages else {}
    found |= {name: Figure.within(getattr(memory, name), _TRACED_BAND, "traced") for name in _MOMENTS}
    found["allocated"] = Figure.within(allocation.allocated, _TRACED_BAND, "modelled")
    found["reserved"] = Figure.within(allocation.reserved, _RESERVED_BAND, "modelled")
    found["context"] = Figure.within(allocation.context, _ASSUMED_BAND, "assumed")
    found["communicators"] = Figure.within(allocation.communicators, _ASSUMED_BAND, "assumed")
    parts = [found[name] for name in ("reserved", "context", "communicators")]
    found["total"] = Figure(
        value=allocation.total,
        known="modelled",
        low=sum(part.low for part in parts),
        high=sum(part.high for part in parts),
    )
    return found
