"""What a run did, from the trace files that it left: read, measured, drawn."""

from __future__ import annotations

from composer3d.timeline.measuring import Bubble, RankTimes, Report, measure, statements
from composer3d.timeline.page import draw_page, draw_svg
from composer3d.timeline.reading import Span, Trace, read_trace

__all__ = [
    "Bubble",
    "RankTimes",
    "Report",
    "Span",
    "Trace",
    "draw_page",
    "draw_svg",
    "measure",
    "read_trace",
    "statements",
]
