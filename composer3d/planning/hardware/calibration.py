"""What the machine at hand does: products, attention, memory, launches and collectives, measured on every rank at once.

Ranks measure together, as they train together: on a CPU they share memory and caches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from composer3d.planning.hardware.quantity import BANDWIDTH, COMPUTE, SIZE, TIME, show

__all__ = ["Measurement", "hardware_tables", "measure", "mean_of"]

_SUM_OPS = 2  # multiplication and addition
_CPU_CONTEXT, _GPU_CONTEXT = 0, int(1.5 * 2**30)
_REPEATS = 3
_SLOW_CPU, _SLOW_GPU = 2e10, 2e13  # operations a second, for what a budget allows
_SLOW_LINK = 1e8  # bytes a second, likewise


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one rank measured.

    Args:
        device: Its name.
        memory_bytes: That it may use.
        gemms: Dtype, rows, columns, sum length and operations a second.
        attention: Operations a second of a causal kernel's forward, of those that it executes.
        attention_backward: The same of its backward.
        bandwidth: Bytes a second of a long copy, read and written.
        host_bandwidth: Bytes a second from the host's memory to the device's.
        launch_s: From one small operator to the next, with autograd.
        collectives: Operation, bytes of the whole buffer and seconds.
        num_ranks: That measured together.
        per_node: Of them on one node.
    """

    device: str
    memory_bytes: int
    gemms: tuple[tuple[str, int, int, int, float], ...]
    attention: float
    attention_backward: float
    bandwidth: float
    host_bandwidth: float
    launch_s: float
    collectives: tuple[tuple[str, int, float], ...]
    num_ranks: int
    per_node: int


def measure(device: torch.device, *, seconds: float, per_node: int) -> Measurement:
    """Measure on this rank, while all others do the same.

    Args:
        device: Where.
        seconds: For all of it, about.
        per_node: Ranks that share a node.

    Memory: some hundred MiB. Collectives: all-reduces, all-gathers and reduce-scatters of 4 KiB to 16 MiB on CPU, to
    256 MiB on a GPU, where there are several ranks.
    """
    on_cpu = device.type == "cpu"
    dtypes = (torch.float32, torch.bfloat16)
    shapes = _affordable(on_cpu, seconds / (2 * len(dtypes)))
    each = seconds / (2 * len(shapes) * len(dtypes))
    gemms = tuple(
        (str(dtype).removeprefix("torch."), m, n, k, _gemm(device, dtype, (m, n, k), each))
        for dtype in dtypes
        for m, n, k in shapes
    )
    forward, backward = _attention(device, seconds / 12)
    bandwidth, host = _copies(device, seconds / 12)
    return Measurement(
        device="CPU core" if on_cpu else torch.cuda.get_device_name(device),
        memory_bytes=_memory(device, per_node),
        gemms=gemms,
        attention=forward,
        attention_backward=backward,
        bandwidth=bandwidth,
        host_bandwidth=host,
        launch_s=_launch(device, seconds / 12),
        collectives=tuple(_collectives(device, seconds / 4)),
        num_ranks=dist.get_world_size() if dist.is_initialized() else 1,
        per_node=per_node,
    )


def _shapes(on_cpu: bool) -> Iterator[tuple[int, int, int]]:
    """Yield rows, columns and sum lengths: what small models have on a CPU, and large ones on a GPU."""
    rows = (64, 512, 2048) if on_cpu else (512, 2048, 8192)
    widths = (64, 256, 1024) if on_cpu else (1024, 4096, 8192)
    for m in rows:
        for width in widths:
            yield m, width, width
            yield m, 4 * width, width
            yield m, width, 4 * width


def _affordable(on_cpu: bool, budget: float) -> list[tuple[int, int, int]]:
    """Return the smaller shapes, as many as the budget allows at a low speed; all ranks take the same."""
    left = budget * (_SLOW_CPU if on_cpu else _SLOW_GPU)
    chosen: list[tuple[int, int, int]] = []
    for shape in sorted(_shapes(on_cpu), key=math.prod):
        left -= (_REPEATS + 2) * _SUM_OPS * math.prod(shape)
        if left < 0 and len(chosen) >= _REPEATS:
            break
        chosen.append(shape)
    return chosen


def _seconds(device: torch.device, function: Callable[[], Any], budget: float) -> float:
    """Return the median time of calls: at least three, and no more than the budget allows."""

    def once() -> float:
        _wait(device)
        begin = time.perf_counter()
        function()
        _wait(device)
        return time.perf_counter() - begin

    once()
    first = once()
    number = max(_REPEATS, min(50, int(budget / max(first, 1e-7))))
    return statistics.median(once() for _ in range(number))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _gemm(device: torch.device, dtype: torch.dtype, dims: tuple[int, int, int], budget: float) -> float:
    m, n, k = dims
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
    return _SUM_OPS * m * n * k / _seconds(device, lambda: left @ right, budget)


def _attention(device: torch.device, budget: float) -> tuple[float, float]:
    """Return operations a second of forward and backward, half of the square as a causal kernel executes it."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    batch, heads, length, dim = (2, 4, 256, 32) if device.type == "cpu" else (4, 16, 4096, 128)
    q, k, v = (torch.randn(batch, heads, length, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    flops = 4 * batch * heads * length**2 * dim / 2

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        forward().sum().backward()

    ahead = _seconds(device, forward, budget / 2)
    back = max(_seconds(device, both, budget / 2) - ahead, ahead)
    return flops / ahead, 2.5 * flops / back


def _copies(device: torch.device, budget: float) -> tuple[float, float]:
    size = 2**26 if device.type == "cpu" else 2**30
    source = torch.empty(size // 4, device=device)
    target = torch.empty_like(source)
    inside = 2 * size / _seconds(device, lambda: target.copy_(source), budget / 2)
    if device.type == "cpu":
        return inside, inside / 2
    pinned = torch.empty(2**28 // 4, pin_memory=True)
    return inside, 2**28 / _seconds(device, lambda: target[: 2**26].copy_(pinned, non_blocking=True), budget / 2)


def _launch(device: torch.device, budget: float) -> float:
    """Return the time of a small operator in a chain, forward and backward."""
    number = 100
    start = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        value = start
        for _ in range(number):
            value = value * 1.0
        value.sum().backward()

    return _seconds(device, chain, budget) / (2 * number)


def _memory(device: torch.device, per_node: int) -> int:
    if device.type != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node


def _collectives(device: torch.device, budget: float) -> Iterator[tuple[str, int, float]]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    ranks = dist.get_world_size()
    sizes = [4096 * 4**power for power in range(7 if device.type == "cpu" else 9)]
    calls_each = 4 * (_REPEATS + 1)  # with an all-reduce's two passes
    sizes = [size for size in sizes if size < 2**18 or calls_each * size / _SLOW_LINK < budget / 2]
    each = budget / (3 * len(sizes))
    for size in sizes:
        whole = torch.zeros(size // 4 // ranks * ranks, device=device)
        part = torch.zeros(whole.numel() // ranks, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather, list(whole.chunk(ranks)), part),
            "reduce_scatter": partial(dist.reduce_scatter, part, list(whole.chunk(ranks))),
        }
        for name, call in calls.items():
            # The number of calls is one for all ranks: each waits for the others.
            number = max(_REPEATS, min(50, int(each / (1e-4 + size / 1e9))))
            times = []
            for _ in range(number + 1):
                dist.barrier()
                _wait(device)
                begin = time.perf_counter()
                call()
                _wait(device)
                times.append(time.perf_counter() - begin)
            yield name, whole.numel() * 4, statistics.median(times[1:])


def mean_of(measured: Sequence[Measurement]) -> Measurement:
    """Return the mean of what ranks measured; of collectives the slowest rank's time."""
    first = measured[0]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in measured)

    gemms = tuple(
        (*row[:4], statistics.fmean(one.gemms[index][4] for one in measured)) for index, row in enumerate(first.gemms)
    )
    collectives = tuple(
        (row[0], row[1], max(one.collectives[index][2] for one in measured))
        for index, row in enumerate(first.collectives)
    )
    return Measurement(
        device=first.device,
        memory_bytes=first.memory_bytes,
        gemms=gemms,
        attention=mean("attention"),
        attention_backward=mean("attention_backward"),
        bandwidth=mean("bandwidth"),
        host_bandwidth=mean("host_bandwidth"),
        launch_s=mean("launch_s"),
        collectives=collectives,
        num_ranks=first.num_ranks,
        per_node=first.per_node,
    )


def hardware_tables(found: Measurement, *, machine: str, is_cpu: bool) -> dict[str, Any]:
    """Return a hardware file's tables.

    Args:
        found: The mean over ranks.
        machine: Where and with what it was measured, for `sources`.
        is_cpu: Whether operators run one after the other in their rank's own thread.
    """
    peaks = {dtype: max(row[4] for row in found.gemms if row[0] == dtype) for dtype in {row[0] for row in found.gemms}}
    compute = peaks["float32" if is_cpu else "bfloat16"]
    link = _link(found)
    measured = ["products", "attention", "memory bandwidth", "launches"]
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
            "attention_efficiency": min(1.0, round(found.attention / compute, 4)),
            "attention_backward_efficiency": min(1.0, round(found.attention_backward / compute, 4)),
            "launch": show(found.launch_s, TIME),
            "asynchronous": not is_cpu,
            "context": show(_CPU_CONTEXT if is_cpu else _GPU_CONTEXT, SIZE),
            "reserve_factor": 1.0 if is_cpu else 1.12,
            "gemm": [
                {"dtype": dtype, "m": m, "n": n, "k": k, "speed": show(speed, COMPUTE)}
                for dtype, m, n, k, speed in found.gemms
            ],
            "peak": {dtype: show(speed, COMPUTE) for dtype, speed in sorted(peaks.items())},
            "gemm_efficiency": {"default": 1.0},
        },
        "intra": {"name": "measured in a node", **link},
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


def _table(bandwidth: float, latency: float, base: float) -> dict[str, Any]:
    return {
        "bandwidth": show(bandwidth, BANDWIDTH),
        "direction": "each",
        "per": "device",
        "efficiency": 1.0,
        "latency": show(latency, TIME),
        "base": show(base, TIME),
    }
