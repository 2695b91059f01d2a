"""Collective times as a step calls them: between two stretches of compute, into fresh memory, unaligned.

A rank that has computed waits for the others, its caches hold what it computed with, and on a CPU the backend's threads
share the cores with the ranks: a collective alone, of ranks that were lined up first, is faster than any in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from composer3d import torch_compat
from composer3d.planning.hardware.timed_calls import REPEATS, wait_for

__all__ = ["collective_times"]

_SLOW_LINK = 1e8  # bytes a second, for what a budget allows
_ROUNDS = 3
_MOST_CALLS, _KEPT = 15, 0.9  # the slowest tenth is another process's doing
_ROWS, _WIDTH, _PRODUCTS = 512, 256, 12  # of the work between two collectives: some ms, as much as a small block is


def collective_times(device: torch.device, budget: float) -> Iterator[tuple[str, int, float]]:
    """Yield operation, bytes of the whole buffer, and this rank's seconds; nothing where there is one rank only.

    Args:
        device: Where the buffers are.
        budget: Seconds for all of it, about.

    Collectives: all-reduces, all-gathers, reduce-scatters and messages of 4 KiB to 16 MiB on CPU, to 256 MiB on a GPU.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    sizes = [4096 * 4**power for power in range(7 if device.type == "cpu" else 9)]
    calls_each = 4 * (REPEATS + 1)  # with an all-reduce's two passes
    sizes = [size for size in sizes if size < 2**18 or calls_each * size / _SLOW_LINK < budget / 2]
    factors = torch.randn(_ROWS, _WIDTH, device=device), torch.randn(_WIDTH, _WIDTH, device=device)
    buffers = [(size, _calls(device, size // 4)) for size in sizes]
    found: dict[tuple[str, int], list[float]] = {}
    # In rounds, so that what disturbs the machine for a while disturbs no size alone.
    for _ in range(_ROUNDS):
        for size, calls in buffers:
            # The number of calls is one for all ranks: each waits for the others.
            one_s = (1.5e-2 + 2 * size / 1e9) * _ROUNDS
            number = max(REPEATS, min(_MOST_CALLS, int(budget / (len(sizes) * len(calls)) / one_s)))
            for name, call in calls.items():
                found.setdefault((name, size), []).append(_mean_s(device, call, number, factors))
    for (name, size), means in found.items():
        yield name, size, statistics.median(means)


def _mean_s(
    device: torch.device, call: Callable[[], Any], number: int, factors: tuple[torch.Tensor, torch.Tensor]
) -> float:
    times = []
    dist.barrier()
    for _ in range(number + 1):
        values = factors[0]
        for _ in range(_PRODUCTS):
            values = F.silu(values @ factors[1]) + values
        wait_for(device)
        begin = time.perf_counter()
        call()
        wait_for(device)
        times.append(time.perf_counter() - begin)
    return statistics.fmean(sorted(times[1:])[: max(1, round(_KEPT * number))])


def _calls(device: torch.device, elements: int) -> dict[str, Callable[[], Any]]:
    """Return the collectives of a buffer; messages go between neighbours, both ways one after the other."""
    ranks, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    whole = torch.zeros(elements // ranks * ranks, device=device)
    part = whole[: elements // ranks].clone()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole.clone()),
        "all_gather": lambda: torch_compat.all_gather_single(torch.empty_like(whole), part.clone(), group=world),
        "reduce_scatter": lambda: torch_compat.reduce_scatter_single(
            torch.empty_like(part), whole.clone(), group=world
        ),
    }
    peer = rank ^ 1
    calls["send"] = partial(_exchange, whole, peer) if peer < ranks else _nothing
    return calls


def _reduce_scatter(part: torch.Tensor, whole: torch.Tensor) -> None:
    torch_compat.reduce_scatter_single(torch.empty_like(part), whole.clone(), group=dist.group.WORLD)


def _exchange(buffer: torch.Tensor, peer: int) -> None:
    """Send to the peer and receive from it, as neighbouring stages do."""
    operations = [dist.P2POp(dist.isend, buffer, peer), dist.P2POp(dist.irecv, torch.empty_like(buffer), peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _nothing() -> None:
    """Stand for the messages of the last rank of an odd number."""
