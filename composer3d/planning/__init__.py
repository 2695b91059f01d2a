"""What a run will cost, before it is paid for."""

from __future__ import annotations

from composer3d.planning.schedules.drawing import draw_svg, draw_text
from composer3d.planning.schedules.simulation import Cell, Costs, Simulation, simulate

__all__ = ["Cell", "Costs", "Simulation", "draw_svg", "draw_text", "simulate"]
