"""Calibration of a machine: products, attention, memory, launches and collectives, measured on every rank at once.

Ranks measure together, as they train together: on a CPU they share memory and caches.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from composer3d.planning.hardware.collective_times import collective_times
from composer3d.planning.hardware.cpu_operators import time_references
from composer3d.planning.hardware.host_time import launch_seconds, overhead_seconds
from composer3d.planning.hardware.kernels import attention_speeds, gemm_shapes, gemm_speed
from composer3d.planning.hardware.quantity import BANDWIDTH, COMPUTE, SIZE, TIME, show
from composer3d.planning.hardware.timed_calls import seconds_of

__all__ = ["Measurement", "hardware_tables", "measure", "mean_of"]

_CPU_CONTEXT, _GPU_CONTEXT = 0, int(1.5 * 2**30)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurements of one rank.

    Args:
        device: Its name.
        memory_bytes: That it may use.
        gemms: Dtype, rows, columns, sum length and operations a second.
        attention: Dtype, length, width of a head, and operations a second of a causal kernel's forward and backward,
            of those that it executes.
        bandwidth: Bytes a second of a long copy, read and written.
        host_bandwidth: Bytes a second from the host's memory to the device's.
        launch_s: From one operator of a step to the next, where kernels have nothing to do.
        collectives: Operation, bytes of the whole buffer and seconds.
        num_ranks: That measured together.
        per_node: Of them on one node.
        operators: Name, dtype, bytes and seconds of single operators, on a CPU.
        overheads: Of `overhead_seconds`: name and seconds.
        fresh_bandwidth: Bytes a second of memory that the system hands out anew, on a CPU.
    """

    device: str
    memory_bytes: int
    gemms: tuple[tuple[str, int, int, int, float], ...]
    attention: tuple[tuple[str, int, int, float, float], ...]
    bandwidth: float
    host_bandwidth: float
    launch_s: float
    collectives: tuple[tuple[str, int, float], ...]
    num_ranks: int
    per_node: int
    operators: tuple[tuple[str, str, int, float], ...] = ()
    overheads: tuple[tuple[str, float], ...] = ()
    fresh_bandwidth: float = 0.0


def measure(device: torch.device, *, seconds: float, per_node: int) -> Measurement:
    """Measure on this rank, while all others do the same.

    Args:
        device: Where.
        seconds: For all of it, about.
        per_node: Ranks that share a node.

    Memory: some hundred MiB. Collectives: all-reduces, all-gathers, reduce-scatters and messages of 4 KiB to 16 MiB on
    CPU, to 256 MiB on a GPU, where there are several ranks; and barriers, so that ranks measure the same together.
    """
    on_cpu = device.type == "cpu"
    dtypes = (torch.float32, torch.bfloat16)
    gemms = _gemms(device, dtypes, seconds / 3)
    _line_up()
    attention = tuple(attention_speeds(device, dtypes if on_cpu else (torch.bfloat16,), seconds / 12))
    _line_up()
    operators = tuple(time_references(dtypes, seconds / 4)) if on_cpu else ()
    _line_up()
    bandwidth, host = _copies(device, seconds / 24)
    _line_up()
    return Measurement(
        device="CPU core" if on_cpu else torch.cuda.get_device_name(device),
        memory_bytes=_memory(device, per_node),
        gemms=gemms,
        attention=attention,
        bandwidth=bandwidth,
        host_bandwidth=host,
        launch_s=launch_seconds(device, seconds / 24),
        collectives=tuple(collective_times(device, seconds / 4)),
        num_ranks=dist.get_world_size() if dist.is_initialized() else 1,
        per_node=per_node,
        operators=operators,
        overheads=tuple(overhead_seconds(device, seconds / 24)),
        fresh_bandwidth=_fresh(seconds / 24) if on_cpu else 0.0,
    )


def _line_up() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gemms(
    device: torch.device, dtypes: Sequence[torch.dtype], budget: float
) -> tuple[tuple[str, int, int, int, float], ...]:
    shapes = gemm_shapes(device.type == "cpu", budget / len(dtypes))
    each = budget / (len(shapes) * len(dtypes))
    return tuple(
        (str(dtype).removeprefix("torch."), *dims, gemm_speed(device, dtype, dims, each))
        for dtype in dtypes
        for dims in shapes
    )


def _copies(device: torch.device, budget: float) -> tuple[float, float]:
    size = 2**26 if device.type == "cpu" else 2**30
    source = torch.empty(size // 4, device=device)
    target = torch.empty_like(source)
    inside = 2 * size / seconds_of(device, lambda: target.copy_(source), budget / 2)
    if device.type == "cpu":
        return inside, inside / 2
    pinned = torch.empty(2**28 // 4, pin_memory=True)
    return inside, 2**28 / seconds_of(device, lambda: target[: 2**26].copy_(pinned, non_blocking=True), budget / 2)


def _fresh(budget: float) -> float:
    """Return how fast memory comes that is above all that malloc keeps, less the time of writing to it."""
    size = 2**26
    kept = torch.empty(size // 4)
    writing = seconds_of(kept.device, kept.zero_, budget / 2)
    return size / max(seconds_of(kept.device, lambda: torch.empty(size // 4).zero_(), budget / 2) - writing, 1e-6)


def _memory(device: torch.device, per_node: int) -> int:
    if device.type != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node


def mean_of(measured: Sequence[Measurement]) -> Measurement:
    """Return the mean of what ranks measured; of collectives the middle rank's time.

    A rank that comes first waits for the others, which is not the collective's time alone; the last does not wait.
    """
    first = measured[0]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in measured)

    def rows(name: str, num_keys: int, middle: Callable[..., float] = statistics.fmean) -> Any:
        """Return rows whose first columns are alike in all ranks."""
        columns = zip(*(getattr(one, name) for one in measured), strict=True)
        return tuple(
            (*same[0][:num_keys], *(middle(values) for values in zip(*(row[num_keys:] for row in same), strict=True)))
            for same in columns
        )

    return Measurement(
        device=first.device,
        memory_bytes=first.memory_bytes,
        gemms=rows("gemms", 4),
        attention=rows("attention", 3),
        bandwidth=mean("bandwidth"),
        host_bandwidth=mean("host_bandwidth"),
        launch_s=mean("launch_s"),
        collectives=rows("collectives", 2, statistics.median),
        num_ranks=first.num_ranks,
        per_node=first.per_node,
        operators=rows("operators", 3),
        overheads=rows("overheads", 1),
        fresh_bandwidth=mean("fresh_bandwidth"),
    )


def hardware_tables(found: Measurement, *, machine: str, is_cpu: bool) -> dict[str, Any]:
    """Return a hardware file's tables.

    Args:
        found: The mean over ranks.
        machine: Where and with what it was measured, for `sources`.
        is_cpu: Whether operators run one after the other in their rank's own thread.
    """
    peaks = {dtype: max(row[4] for row in found.gemms if row[0] == dtype) for dtype in {row[0] for row in found.gemms}}
    main = "float32" if is_cpu else "bfloat16"
    ahead = statistics.fmean(row[3] for row in found.attention if row[0] == main)
    back = statistics.fmean(row[4] for row in found.attention if row[0] == main)
    link = _link(found)
    measured = ["products", "attention", "memory bandwidth", "launches"]
    measured += ["operators"] if found.operators else []
    measured += ["collectives of a node"] if found.num_ranks > 1 else []
    spans = found.num_ranks > found.per_node
    return {
        "devices_per_node": found.per_node,
        # On a CPU a collective takes the core's time from compute: nothing is hidden.
        "slowdown": 2.0 if is_cpu else 1.1,
        "known": "calibrated",
        "measured": [*measured, "collectives between nodes"] if spans else measured,
        "sources": [machine],
        "device": {
            "name": found.device,
            "memory": show(found.memory_bytes, SIZE),
            "memory_bandwidth": show(found.bandwidth, BANDWIDTH),
            "memory_efficiency": 1.0,
            "attention_efficiency": min(1.0, round(ahead / peaks[main], 4)),
            "attention_backward_efficiency": min(1.0, round(back / peaks[main], 4)),
            "launch": show(found.launch_s, TIME),
            "asynchronous": not is_cpu,
            "context": show(_CPU_CONTEXT if is_cpu else _GPU_CONTEXT, SIZE),
            "reserve_factor": 1.0 if is_cpu else 1.12,
            "gemm": [
                {"dtype": dtype, "m": m, "n": n, "k": k, "speed": show(speed, COMPUTE)}
                for dtype, m, n, k, speed in found.gemms
            ],
            "attention": [
                {"dtype": dtype, "length": length, "width": width}
                | {"forward": show(forward, COMPUTE), "backward": show(backward, COMPUTE)}
                for dtype, length, width, forward, backward in found.attention
            ],
            "operator": [
                {"name": name, "dtype": dtype, "bytes": show(moved, SIZE), "time": show(seconds, TIME)}
                for name, dtype, moved, seconds in found.operators
            ],
            "peak": {dtype: show(speed, COMPUTE) for dtype, speed in sorted(peaks.items())},
            "gemm_efficiency": {"default": 1.0},
            **({"fresh_bandwidth": show(found.fresh_bandwidth, BANDWIDTH)} if found.fresh_bandwidth else {}),
            "overhead": {name: show(seconds, TIME) for name, seconds in found.overheads},
        },
        "intra": {"name": "measured in a node", **link, "collective": [] if spans else _timed(found)},
        "inter": {"name": "measured between nodes" if spans else "not measured: as in a node", **link},
        "host": {
            "name": "measured to the host",
            **_table(found.host_bandwidth, 5e-6, 5e-6),
        },
    }


def _link(found: Measurement) -> Mapping[str, Any]:
    """Fit latency and bandwidth: the smallest buffers are latency, what larger ones take longer is bandwidth."""
    if not found.collectives:
        return _table(found.bandwidth / 2, 1e-6, 1e-6)
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    least = min(size for _, size, _ in found.collectives)
    most = max(size for _, size, _ in found.collectives)
    times = {(name, size): seconds for name, size, seconds in found.collectives}
    part = (found.num_ranks - 1) / found.num_ranks
    speeds = [
        passes[name] * part * (most - least) / max(times[name, most] - times[name, least], 1e-9) for name in passes
    ]
    latency = min(times[name, least] / passes[name] for name in passes)
    steps = max(1, found.num_ranks - 1)
    return _table(math.exp(statistics.fmean(map(math.log, speeds))), latency / 2 / steps, latency / 2)


def _timed(found: Measurement) -> list[dict[str, Any]]:
    return [
        {"op": op, "ranks": 2 if op == "send" else found.num_ranks, "bytes": show(size, SIZE)}
        | {"time": show(seconds, TIME)}
        for op, size, seconds in found.collectives
    ]


def _table(bandwidth: float, latency: float, base: float) -> dict[str, Any]:
    return {
        "bandwidth": show(bandwidth, BANDWIDTH),
        "direction": "each",
        "per": "device",
        "efficiency": 1.0,
        "latency": show(latency, TIME),
        "base": show(base, TIME),
    }
