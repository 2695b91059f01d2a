"""Timeline of a run from its trace files: reading, figures and drawings."""

from __future__ import annotations

from composer3d.diagnostics.timeline.trace_figures import Bubble, RankTimes, Report, Traffic, measure, statements
from composer3d.diagnostics.timeline.trace_files import Span, Trace, read_trace
from composer3d.diagnostics.timeline.trace_page import draw_page, draw_svg

__all__ = [
    "Bubble",
    "RankTimes",
    "Report",
    "Span",
    "Trace",
    "Traffic",
    "draw_page",
    "draw_svg",
    "measure",
    "read_trace",
    "statements",
]
