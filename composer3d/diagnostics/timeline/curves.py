"""A run's curves: loss, rate, times and memory, drawn as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from composer3d.diagnostics.timeline.trace_files import Trace

__all__ = ["draw_curves"]

_SHOWN = {
    "loss": ("loss", 1.0),
    "grad_norm": ("gradient norm", 1.0),
    "tokens_per_s": ("tokens a second", 1.0),
    "samples_per_s": ("samples a second", 1.0),
    "step_time_s": ("step time, ms", 1e3),
    "data_wait_s": ("waiting for data, ms", 1e3),
    "mfu": ("MFU", 1.0),
    "mfu_6n": ("MFU, 6 operations a parameter and token", 1.0),
}
_LEFT_OUT = frozenset({"step", "tokens", "samples", "time"})
_LINES = ("#1565c0", "#c62828", "#2e7d32", "#ef6c00", "#6a1b9a", "#00838f", "#4e342e", "#9e9d24")
_LEFT, _TOP, _WIDTH, _HEIGHT = 64, 8, 500, 110

Points = Sequence[tuple[float, float]]


def draw_curves(trace: Trace) -> str:
    """Return a figure for each quantity of `metrics.jsonl`, and one of every rank's memory.

    Of quantities that are not known by name, as those that plugins measure, only where they change.

    Args:
        trace: As it was read.
    """
    figures = []
    others = {name: (name.replace("_", " "), 1.0) for row in trace.rows for name in row if name not in _LEFT_OUT}
    for name, (title, scale) in {**others, **_SHOWN}.items():
        points = [
            (float(row["step"]), scale * float(row[name]))
            for row in trace.rows
            if "step" in row and isinstance(row.get(name), int | float)
        ]
        if name in _SHOWN or len({value for _, value in points}) > 1:
            figures.append(_figure(title, {"": points}, "step"))
    memory = {
        f"rank {rank}": [(float(number), value / 2**20) for number, value in enumerate(values, start=1)]
        for rank, values in trace.memory.items()
    }
    figures.append(_figure("resident memory, MiB", memory, "sample"))
    found = "".join(figures)
    return f'<h2>Curves</h2><div class="curves">{found}</div>' if found else ""


def _figure(title: str, lines: Mapping[str, Points], below: str) -> str:
    """Draw lines over one another; nothing where none has two points."""
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return ""
    ends = [point for points in lines.values() for point in points]
    left, right = min(x for x, _ in ends), max(x for x, _ in ends)
    low, high = min(y for _, y in ends), max(y for _, y in ends)
    width, height = (right - left) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> str:
        return f"{_LEFT + _WIDTH * (x - left) / width:.1f},{_TOP + _HEIGHT * (1 - (y - low) / height):.1f}"

    told = ""
    if len(lines) == 1:
        ((_, (*_, (_, last))),) = lines.items()
        told = f": {_short(next(iter(lines.values()))[0][1])} to {_short(last)}"
    parts = [f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="#f7f9fa" stroke="#cfd8dc"/>']
    for value, y in ((high, _TOP + 10), (low, _TOP + _HEIGHT)):
        parts.append(f'<text x="{_LEFT - 5}" y="{y}" text-anchor="end">{_short(value)}</text>')
    for value, anchor, x in ((left, "start", _LEFT), (right, "end", _LEFT + _WIDTH)):
        text = f"{below} {value:g}"
        parts.append(f'<text x="{x}" y="{_TOP + _HEIGHT + 14}" text-anchor="{anchor}">{text}</text>')
    for number, (name, points) in enumerate(lines.items()):
        color = _LINES[number % len(_LINES)]
        path = " ".join(place(x, y) for x, y in points)
        parts.append(
            f'<g><title>{escape(name or title)}</title><polyline fill="none" stroke="{color}" stroke-width="1.5" '
            f'points="{path}"/></g>'
        )
        if name and number < len(_LINES):
            parts.append(f'<text x="{_LEFT + 8 + 58 * number}" y="{_TOP + 14}" fill="{color}">{escape(name)}</text>')
    return (
        f'<figure><figcaption>{escape(title + told)}</figcaption><svg width="{_LEFT + _WIDTH + 8}" '
        f'height="{_TOP + _HEIGHT + 20}" font-family="sans-serif" font-size="11">{"".join(parts)}</svg></figure>'
    )


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
