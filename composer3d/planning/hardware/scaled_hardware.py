"""The same cluster with faster or slower parts, for what a plan would be on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer3d.errors import ComposerError, known_words
from composer3d.planning.hardware.cluster import Device, Hardware, Link, TimedCollective

__all__ = ["SCALED_PARTS", "parse_factors", "scaled"]


def scaled(hardware: Hardware, factors: Mapping[str, float]) -> Hardware:
    """Return a cluster whose parts are so many times as fast, or wait so many times as long.

    Args:
        hardware: The cluster.
        factors: By part, as in `SCALED_PARTS`; 0.5 is half of a speed or of a latency.

    Raises:
        ComposerError: There is no such part, or a factor is not between 0.01 and 100.
    """
    for part, factor in factors.items():
        if part not in SCALED_PARTS:
            names = sorted(SCALED_PARTS)
            raise ComposerError(f'a cluster has no part "{part}"; {known_words(part, names)}')
        if not 0.01 <= factor <= 100:
            raise ComposerError(f"{part} = {factor:g}x: a factor is at least 0.01x and at most 100x")
        hardware = SCALED_PARTS[part](hardware, factor)
    told = ", ".join(f"{part} {factor:g}x" for part, factor in factors.items())
    return replace(hardware, name=f"{hardware.name} with {told}") if told else hardware


def parse_factors(texts: Sequence[str]) -> dict[str, float]:
    """Read items `PART=FACTOR`, such as `network=0.5x`.

    >>> parse_factors(["network=0.5x", "flops=2"])
    {'network': 0.5, 'flops': 2.0}

    Raises:
        ComposerError: One is not written so, or two are of one part.
    """
    factors: dict[str, float] = {}
    for part, factor in map(_parse_factor, texts):
        if part in factors:
            raise ComposerError(f"{part} is given two factors, {factors[part]:g}x and {factor:g}x; state it once")
        factors[part] = factor
    return factors


def _parse_factor(text: str) -> tuple[str, float]:
    part, separator, factor = text.partition("=")
    try:
        number = float(factor.strip().removesuffix("x"))
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        said = "has no number above 0 as its factor" if separator else "has no factor"
        raise ComposerError(f'"{text}" {said}; write for example network=0.5x')
    return part.strip(), number


def _flops(hardware: Hardware, factor: float) -> Hardware:
    device = hardware.device
    peaks = {dtype: peak * factor for dtype, peak in device.peaks.items()}
    gemms = tuple(replace(gemm, flops_per_s=gemm.flops_per_s * factor) for gemm in device.gemms)
    attentions = tuple(
        replace(row, forward=row.forward * factor, backward=row.backward * factor) for row in device.attentions
    )
    return _with_device(hardware, peaks=peaks, gemms=gemms, attentions=attentions)


def _memory(hardware: Hardware, factor: float) -> Hardware:
    operators = tuple(replace(row, seconds=row.seconds / factor) for row in hardware.device.operators)
    bandwidth = hardware.device.memory_bandwidth * factor
    return _with_device(hardware, memory_bandwidth=bandwidth, operators=operators)


def _launch(hardware: Hardware, factor: float) -> Hardware:
    overheads = {name: seconds * factor for name, seconds in hardware.device.overheads.items()}
    return _with_device(hardware, launch_s=hardware.device.launch_s * factor, overheads=overheads)


def _with_device(hardware: Hardware, **changes: Any) -> Hardware:
    device: Device = replace(hardware.device, **changes)
    return replace(hardware, device=device)


def _network(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, inter=_faster(hardware.inter, factor))


def _links(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, intra=_faster(hardware.intra, factor))


def _latency(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, intra=_slower(hardware.intra, factor), inter=_slower(hardware.inter, factor))


def _host(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, host=_faster(hardware.host, factor))


def _host_memory(hardware: Hardware, factor: float) -> Hardware:
    found = hardware.host_memory
    return replace(hardware, host_memory=replace(found, bandwidth=found.bandwidth * factor))


def _drive(hardware: Hardware, factor: float) -> Hardware:
    found = hardware.drive
    return replace(hardware, drive=replace(found, read=found.read * factor, write=found.write * factor))


def _faster(link: Link, factor: float) -> Link:
    """Scale what grows with the bytes; of a collective that was timed, what it takes beyond the least that was."""
    least = _least_s(link)
    timed = tuple(replace(row, seconds=least[_kind(row)] + _beyond(row, least) / factor) for row in link.timed)
    return replace(link, bandwidth=link.bandwidth * factor, timed=timed)


def _slower(link: Link, factor: float) -> Link:
    """Scale what every collective waits for, whatever its size."""
    least = _least_s(link)
    timed = tuple(replace(row, seconds=least[_kind(row)] * factor + _beyond(row, least)) for row in link.timed)
    return replace(link, latency_s=link.latency_s * factor, base_s=link.base_s * factor, timed=timed)


def _kind(row: TimedCollective) -> tuple[str, int]:
    return row.op, row.ranks


def _beyond(row: TimedCollective, least: Mapping[tuple[str, int], float]) -> float:
    return max(0.0, row.seconds - least[_kind(row)])


def _least_s(link: Link) -> dict[tuple[str, int], float]:
    """Return the shortest time of each kind of collective that was timed: all latency."""
    least: dict[tuple[str, int], float] = {}
    for row in link.timed:
        least[_kind(row)] = min(least.get(_kind(row), row.seconds), row.seconds)
    return least


SCALED_PARTS: Mapping[str, Callable[[Hardware, float], Hardware]] = {
    "flops": _flops,
    "memory": _memory,
    "launch": _launch,
    "links": _links,
    "network": _network,
    "latency": _latency,
    "host": _host,
    "host_memory": _host_memory,
    "drive": _drive,
}
