"""Cost planning: memory, time and communication of a run, before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes import late_imports

if TYPE_CHECKING:
    from composer3d.planning.costs.whole_run import Failures
    from composer3d.planning.manifest_schedule import ScheduleResult, schedule
    from composer3d.planning.plan import Plan
    from composer3d.planning.schedules.drawing import draw_svg, draw_text
    from composer3d.planning.schedules.simulation import Cell, Costs, Simulation, simulate
    from composer3d.planning.tuning.tune import TuneResult, tune_on_machine

_MODULES = {
    "costs.whole_run": ("Failures",),
    "manifest_schedule": ("ScheduleResult", "schedule"),
    "plan": ("Plan",),
    "schedules.drawing": ("draw_svg", "draw_text"),
    "schedules.simulation": ("Cell", "Costs", "Simulation", "simulate"),
    "tuning.tune": ("TuneResult", "tune_on_machine"),
}

__all__ = [
    "Cell",
    "Costs",
    "Failures",
    "Plan",
    "ScheduleResult",
    "Simulation",
    "TuneResult",
    "draw_svg",
    "draw_text",
    "schedule",
    "simulate",
    "tune_on_machine",
]

__getattr__ = late_imports(__name__, _MODULES)
