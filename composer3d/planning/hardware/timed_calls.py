"""Time of calls on a device, while all ranks of the machine work.

On a CPU it is the thread's processor time: what other processes take of the cores meanwhile is not the machine's doing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["REPEATS", "least_seconds", "seconds_of", "wait_for"]

REPEATS = 3
_MOST_CALLS = 50


def seconds_of(device: torch.device, function: Callable[[], Any], budget: float) -> float:
    """Return the median time of calls: at least three, and no more than the budget allows.

    Args:
        device: Whose queue is waited for before and after every call.
        function: What is timed; on a CPU it waits for nothing.
        budget: Seconds for all calls together.
    """
    clock = _clock_of(device)

    def once() -> float:
        wait_for(device)
        begin = clock()
        function()
        wait_for(device)
        return clock() - begin

    once()
    first = once()
    number = max(REPEATS, min(_MOST_CALLS, int(budget / max(first, 1e-7))))
    return statistics.median(once() for _ in range(number))


def least_seconds(device: torch.device, budget: float) -> float:
    """Return what comes with every call: the time of an operator on a single element.

    Args:
        device: Where.
        budget: Seconds for all calls together.
    """
    one = torch.ones((), device=device)
    return seconds_of(device, lambda: torch.mul(one, one), budget)


def _clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock: of several threads that compute together, no thread's own time is the time of a call."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
