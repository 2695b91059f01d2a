"""Time of what offloading moves and computes: copies over the link to the host, the host's own steps, a drive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.tracing.traced import (
    DISK_READ,
    DISK_WRITE,
    FROM_DEVICE,
    HOST_COPY,
    IN_HOST,
    TO_DEVICE,
    WAITED_COPY,
    Operators,
    Segment,
)

__all__ = [
    "OffloadTerm",
    "copied_s",
    "disk_s",
    "host_s",
    "is_of_device",
    "is_offloaded",
    "offload_notes",
    "offload_terms",
    "waited_s",
]

_COPIES = (HOST_COPY, TO_DEVICE, FROM_DEVICE, WAITED_COPY)
_DISK = (DISK_READ, DISK_WRITE)


@dataclass(frozen=True, kw_only=True)
class OffloadTerm:
    """One kind of what offloading does in a step of one rank.

    Args:
        what: As `--json` names it.
        over: The link, the memory or the drive that it uses.
        part: The same as `--what-if` names it.
        bytes: That are moved in a step; of the host's steps those that they read and write.
        seconds: Of all of it, whatever it passes beside.
    """

    what: str
    over: str
    part: str
    bytes: int
    seconds: float


def is_of_device(call: Operators) -> bool:
    """Return whether the device computes an operator, and no copy, drive or host does."""
    return call.name not in _COPIES and call.name not in _DISK and not call.name.startswith(IN_HOST)


def is_offloaded(call: Operators) -> bool:
    """Return whether a drive does an operator, or the host in its own memory: the device launches nothing."""
    return call.name in _DISK or call.name.startswith(IN_HOST)


def copied_s(operators: Sequence[Operators], hardware: Hardware) -> float:
    """Return the seconds of copies on streams of their own: those of two directions pass at the same time."""
    opposite = max(_bytes(operators, TO_DEVICE), _bytes(operators, FROM_DEVICE))
    return (_bytes(operators, HOST_COPY) + opposite) / hardware.host.reached


def waited_s(operators: Sequence[Operators], hardware: Hardware) -> float:
    """Return the seconds of copies that compute waits for."""
    return _bytes(operators, WAITED_COPY) / hardware.host.reached


def host_s(operators: Sequence[Operators], hardware: Hardware) -> float:
    """Return the seconds of what the host computes: all of it is bytes of its memory."""
    moved = math.fsum(call.bytes_moved * call.count for call in operators if call.name.startswith(IN_HOST))
    return moved / hardware.host_memory.reached


def disk_s(operators: Sequence[Operators], hardware: Hardware) -> float:
    """Return the seconds of a drive that reads and writes in turns."""
    return _bytes(operators, DISK_READ) / hardware.drive.read + _bytes(operators, DISK_WRITE) / hardware.drive.write


def offload_terms(segments: Sequence[Segment], hardware: Hardware) -> tuple[OffloadTerm, ...]:
    """Return what offloading does in a rank's step, by kind; nothing where nothing is offloaded.

    Args:
        segments: Of the rank.
        hardware: With one rank's part of what a node's ranks share.
    """
    link, memory, drive = hardware.host, hardware.host_memory, hardware.drive
    kinds: tuple[tuple[str, str, str, float, tuple[str, ...]], ...] = (
        ("copies beside compute", "host", link.name, link.reached, (HOST_COPY, TO_DEVICE, FROM_DEVICE)),
        ("copies waited for", "host", link.name, link.reached, (WAITED_COPY,)),
        ("reads", "drive", drive.name, drive.read, (DISK_READ,)),
        ("writes", "drive", drive.name, drive.write, (DISK_WRITE,)),
    )
    rows = [(what, part, over, speed, _of_step(segments, *names)) for what, part, over, speed, names in kinds]
    computed = sum(
        each.count * call.count * call.bytes_moved
        for each in segments
        for call in each.operators
        if call.name.startswith(IN_HOST)
    )
    rows.append(("steps of the host", "host_memory", memory.name, memory.reached, computed))
    return tuple(
        OffloadTerm(what=what, over=over, part=part, bytes=moved, seconds=moved / speed)
        for what, part, over, speed, moved in rows
        if moved
    )


def offload_notes(segments: Iterable[Segment], hardware: Hardware) -> list[str]:
    """Return which shared parts of a node a plan depends on, and no hardware file states, and what is not timed.

    Args:
        segments: Of all ranks.
        hardware: As its file has it.
    """
    calls = [call for segment in segments for call in segment.operators]
    names = {call.name for call in calls}
    drive, memory, notes = hardware.drive, hardware.host_memory, []
    if drive.is_assumed and names & {*_DISK}:
        notes.append(
            f"{drive.name} that reads {drive.read / 1e9:g} GB/s and writes {drive.write / 1e9:g} GB/s is assumed for "
            "every eight ranks of a node; [drive] in a hardware file states another"
        )
    if memory.is_assumed and any(name.startswith(IN_HOST) for name in names):
        notes.append(
            f"the host steps as fast as its memory: {memory.name}, of whose {memory.bandwidth / 1e9:g} GB/s "
            f"{memory.efficiency:g} are reached, are assumed for every eight ranks of a node; [host_memory] in a "
            "hardware file states another"
        )
    if any(call.flops for call in calls if call.name.startswith(IN_HOST)):
        notes.append(
            "matrix products that the host computes are timed by the bytes that they read and write: they take longer"
        )
    return notes


def _bytes(operators: Sequence[Operators], *names: str) -> int:
    return sum(call.bytes_moved * call.count for call in operators if call.name in names)


def _of_step(segments: Sequence[Segment], *names: str) -> int:
    return sum(each.count * _bytes(each.operators, *names) for each in segments)
