"""Wall-clock time of calls on a device, while all ranks of the machine work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["REPEATS", "seconds_of", "wait_for"]

REPEATS = 3
_MOST_CALLS = 50


def seconds_of(device: torch.device, function: Callable[[], Any], budget: float) -> float:
    """Return the median time of calls: at least three, and no more than the budget allows.

    Args:
        device: Whose queue is waited for before and after every call.
        function: What is timed.
        budget: Seconds for all calls together.
    """

    def once() -> float:
        wait_for(device)
        begin = time.perf_counter()
        function()
        wait_for(device)
        return time.perf_counter() - begin

    once()
    first = once()
    number = max(REPEATS, min(_MOST_CALLS, int(budget / max(first, 1e-7))))
    return statistics.median(once() for _ in range(number))


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
