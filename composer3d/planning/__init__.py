"""Cost planning: memory, time and communication of a run, before it starts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.planning.manifest_schedule import ScheduleResult, schedule
    from composer3d.planning.plan import Plan
    from composer3d.planning.schedules.drawing import draw_svg, draw_text
    from composer3d.planning.schedules.simulation import Cell, Costs, Simulation, simulate

_MODULES = {
    "manifest_schedule": ("ScheduleResult", "schedule"),
    "plan": ("Plan",),
    "schedules.drawing": ("draw_svg", "draw_text"),
    "schedules.simulation": ("Cell", "Costs", "Simulation", "simulate"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Cell",
    "Costs",
    "Plan",
    "ScheduleResult",
    "Simulation",
    "draw_svg",
    "draw_text",
    "schedule",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: some of these modules import torch, which takes a second."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
