"""Cost planning: memory, time and communication of a run, before it starts."""

from __future__ import annotations

from composer3d.planning.schedules.drawing import draw_svg, draw_text
from composer3d.planning.schedules.simulation import Cell, Costs, Simulation, simulate

__all__ = ["Cell", "Costs", "Simulation", "draw_svg", "draw_text", "simulate"]
