"""Measurement of the machine at hand, by all of its ranks together, as the tables of a hardware file."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from composer3d.planning.hardware.calibration import Measurement, hardware_tables, mean_of, measure
from composer3d.planning.hardware.hardware_file import problems_of
from composer3d.processes import all_gather_json, default_device, join_world

if TYPE_CHECKING:
    import torch

__all__ = ["measure_machine"]

_SLACK_S = 60.0
_MOST_RANKS = 8


def measure_machine(*, seconds: float, num_ranks: int | None = None) -> dict[str, Any] | None:
    """Measure products, attention, memory, launches and collectives; return the tables, on the first rank alone.

    Under a launcher its ranks measure together, each on its device. On CPU without one, ranks are forked.

    Args:
        seconds: At most, about.
        num_ranks: To fork on CPU; None takes one a core, 8 at most.

    Memory: that of the largest product and of the largest message. Collectives: those that are timed.
    """
    device = default_device()
    if "RANK" in os.environ or device.type != "cpu":
        measured = _joined(device, seconds)
    else:
        measured = _forked(num_ranks or min(_MOST_RANKS, len(os.sched_getaffinity(0))), seconds)
    if int(os.environ.get("RANK", "0")):
        return None
    tables = hardware_tables(mean_of(measured), machine=_described(len(measured)), is_cpu=device.type == "cpu")
    problems = problems_of(tables)
    assert not problems, problems
    return tables


def _forked(num_ranks: int, seconds: float) -> list[Measurement]:
    """Measure on ranks of this machine, each on one thread."""
    import torch

    from composer3d.testing import run_ranks

    def rank() -> Measurement:
        return measure(torch.device("cpu"), seconds=seconds, per_node=num_ranks)

    return run_ranks(rank, num_ranks, timeout_s=10 * seconds + _SLACK_S)


def _joined(device: torch.device, seconds: float) -> list[Measurement]:
    """Measure on the ranks of a launcher, or on one device alone."""
    release = join_world(device)
    try:
        mine = measure(device, seconds=seconds, per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        everyone = all_gather_json(asdict(mine))
    finally:
        release()
    return [Measurement(**each) for each in everyone]


def _described(num_ranks: int) -> str:
    import torch

    today = datetime.date.today().isoformat()
    return f"measured on {platform.node()} on {today} with torch {torch.__version__}, {num_ranks} ranks together"
