"""A trace as a page that needs nothing but itself, and as an SVG picture: ranks downwards, time to the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from composer3d.timeline.measuring import Report
from composer3d.timeline.reading import Span, Trace

__all__ = ["draw_page", "draw_svg"]

_COLORS = {
    "forward": "#7fb2e5",
    "backward": "#8fcf8f",
    "backward_input": "#8fcf8f",
    "backward_weight": "#e8c16a",
    "optimizer": "#b39ddb",
    "data_wait": "#ef9a9a",
    "checkpoint": "#bcaaa4",
    "evaluate": "#80cbc4",
}
_COLLECTIVE = "#f06292"
_LEFT, _TOP, _ROW, _GAP, _WIDTH = 70, 54, 30, 6, 1120
_STYLE = (
    "body{font-family:sans-serif;margin:24px;color:#263238}table{border-collapse:collapse;margin:12px 0}"
    "td,th{border:1px solid #b0bec5;padding:3px 9px;text-align:right}.scroll{overflow-x:auto}"
)


def draw_svg(trace: Trace, steps: Sequence[int], *, title: str) -> str:
    """Draw some steps: every rank a row, computing in the upper part, collectives in the lower.

    Args:
        trace: As it was read.
        steps: Their numbers.
        title: Above the picture.
    """
    shown = {rank: list(_inside(spans, set(steps))) for rank, spans in trace.ranks.items()}
    times = [time for spans in shown.values() for span in spans for time in (span.start, span.end)]
    first, last = (min(times), max(times)) if times else (0, 1)
    scale = _WIDTH / max(1, last - first)
    height = _TOP + len(shown) * (_ROW + _GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="8" y="20" font-size="15">{escape(title)}</text>',
        *_legend(),
    ]
    for row, (rank, spans) in enumerate(shown.items()):
        y = _TOP + row * (_ROW + _GAP)
        parts.append(f'<g id="rank-{rank}"><text x="8" y="{y + 18}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" fill="#eceff1"/>')
        parts += [
            _bar(span, _LEFT + (span.start - first) * scale, y, (span.end - span.start) * scale) for span in spans
        ]
        parts.append("</g>")
    parts.append(f'<text x="{_LEFT}" y="{height - 10}">{(last - first) / 1e6:.1f} ms</text>')
    return "\n".join([*parts, "</svg>", ""])


def _inside(spans: Sequence[Span], steps: set[int]) -> Iterator[Span]:
    """Yield what is drawn of these steps, what is around before what is inside."""
    own = [span for span in spans if span.name == "step" and span.attributes["step"] in steps]
    if not own:
        return
    start, end = own[0].start, max(span.end for span in own)
    for span in spans:
        is_drawn = span.name in _COLORS or span.is_collective
        before = span.name == "data_wait" and span.attributes.get("step") in steps
        if is_drawn and (before or (span.start >= start and span.end <= end)):
            yield span


def _legend() -> list[str]:
    parts, x = [], _LEFT
    for name, color in {**_COLORS, "collective": _COLLECTIVE}.items():
        if name != "backward_input":
            parts.append(f'<rect x="{x}" y="30" width="14" height="14" fill="{color}"/>')
            parts.append(f'<text x="{x + 19}" y="41">{name}</text>')
            x += 40 + 7 * len(name)
    return parts


def _bar(span: Span, x: float, y: int, width: float) -> str:
    told = " ".join([span.name, *(f"{key}={value}" for key, value in span.attributes.items())])
    told = escape(f"{told}: {(span.end - span.start) / 1e6:.3f} ms")
    top, height, color = y, _ROW, _COLORS.get(span.name, _COLLECTIVE)
    if span.is_collective:
        top, height, color = y + 2 * _ROW // 3, _ROW // 3, _COLLECTIVE
    bar = f'<rect x="{x:.2f}" y="{top}" width="{max(width, 0.3):.2f}" height="{height}" fill="{color}"/>'
    number = span.attributes.get("microbatch")
    label = ""
    if number is not None and width > 12:
        label = f'<text x="{x + width / 2:.2f}" y="{y + 13}" text-anchor="middle">{number}</text>'
    return f"<g><title>{told}</title>{bar}{label}</g>"


def draw_page(trace: Trace, report: Report, steps: Sequence[int], *, title: str) -> str:
    """Return the page: the picture, what was measured, and the run's curves.

    Args:
        trace: As it was read.
        report: Of it.
        steps: Of the picture.
        title: Of the page.
    """
    rows = "".join(
        f"<tr><th>rank {rank}</th>" + "".join(f"<td>{1e3 * value:.2f}</td>" for value in vars(times).values()) + "</tr>"
        for rank, times in report.ranks.items()
    )
    lines = [f"straggler: rank {report.straggler}, which computes {report.straggler_ratio:.2f} times the mean"]
    if report.bubble is not None:
        lines.append(f"bubble: {report.bubble.measured:.1%} measured, {report.bubble.simulated:.1%} simulated")
    lines += [f"{name} was cut off: its rank was killed" for name in trace.cut]
    curves = [
        _curve(name, [float(row[name]) for row in trace.rows if isinstance(row.get(name), int | float)])
        for name in ("loss", "tokens_per_s", "step_time_s", "data_wait_s")
    ] + [_curve(f"memory of rank {rank}, MiB", [v / 2**20 for v in values]) for rank, values in trace.memory.items()]
    return "\n".join(
        [
            f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
            *(f"<p>{escape(line)}</p>" for line in lines),
            f'<div class="scroll">{draw_svg(trace, steps, title=_told(steps))}</div>',
            "<h2>Milliseconds a step, in the mean</h2>",
            "<table><tr><th></th><th>step</th><th>computing</th><th>exposed communication</th><th>optimizer</th>"
            f"<th>data wait</th></tr>{rows}</table>",
            *curves,
            "</body></html>",
            "",
        ]
    )


def _told(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _curve(name: str, values: Sequence[float]) -> str:
    """Draw numbers in order; nothing where there are fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    points = " ".join(
        f"{10 + 480 * index / (len(values) - 1):.1f},{110 - 90 * (value - low) / span:.1f}"
        for index, value in enumerate(values)
    )
    return (
        f"<figure><figcaption>{escape(name)}: {values[0]:.4g} to {values[-1]:.4g}, between {low:.4g} and {high:.4g}"
        f'</figcaption><svg width="500" height="120"><polyline fill="none" stroke="#1565c0" points="{points}"/></svg>'
        "</figure>"
    )
