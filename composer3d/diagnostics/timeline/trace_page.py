"""A trace as a page that needs nothing but itself, and as an SVG picture: ranks downwards, time to the right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from composer3d.diagnostics.timeline.curves import draw_curves
from composer3d.diagnostics.timeline.trace_figures import Report, statements
from composer3d.diagnostics.timeline.trace_files import Span, Trace

__all__ = ["draw_page", "draw_svg"]

_COLORS = {
    "forward": "#7fb2e5",
    "backward": "#8fcf8f",
    "backward_input": "#8fcf8f",
    "backward_weight": "#e8c16a",
    "attention_block": "#4f86c6",
    "optimizer": "#b39ddb",
    "data_wait": "#ef9a9a",
    "checkpoint": "#bcaaa4",
    "evaluate": "#80cbc4",
}
_COLLECTIVE, _PALE_COLLECTIVE = "#f06292", "#fbd3df"
_LEFT, _TOP, _ROW, _GAP, _WIDTH = 70, 54, 30, 6, 1120
_STYLE = (
    "body{font-family:sans-serif;margin:24px;color:#263238;max-width:1240px}h1{margin-bottom:4px}"
    "table{border-collapse:collapse;margin:12px 0}td,th{border:1px solid #cfd8dc;padding:4px 10px;text-align:right}"
    "tr.slow th{color:#c62828}.scroll{overflow-x:auto}.note{color:#607d8b}"
    ".curves{display:flex;flex-wrap:wrap;gap:8px 24px}figure{margin:0}figcaption{font-size:14px;margin:6px 0 2px 8px}"
)


def draw_svg(trace: Trace, steps: Sequence[int], *, title: str) -> str:
    """Draw some steps: every rank a row, computing in the upper part, collectives in the lower.

    A bar that stands for several spans is pale, and filled from its left as far as they took, if they had come one
    after the other.

    Args:
        trace: Spans of all ranks.
        steps: Numbers of the steps that are drawn.
        title: Above the picture.
    """
    shown = {rank: list(_inside(spans, set(steps))) for rank, spans in trace.ranks.items()}
    times = [time for spans in shown.values() for span in spans for time in (span.start, span.end)]
    first, last = (min(times), max(times)) if times else (0, 1)
    scale = _WIDTH / max(1, last - first)
    bottom = _TOP + len(shown) * (_ROW + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" height="{bottom + 24}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="8" y="20" font-size="15">{escape(title)}</text>',
        *_legend(span for spans in shown.values() for span in spans),
    ]
    for row, (rank, spans) in enumerate(shown.items()):
        y = _TOP + row * (_ROW + _GAP)
        parts.append(f'<g id="rank-{rank}"><text x="8" y="{y + 18}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" fill="#eceff1"/>')
        parts += [
            _bar(span, _LEFT + (span.start - first) * scale, y, (span.end - span.start) * scale) for span in spans
        ]
        parts.append("</g>")
    return "\n".join([*parts, *_ruler((last - first) / 1e6, bottom), "</svg>", ""])


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


def _legend(spans: Iterable[Span]) -> list[str]:
    """Return what the colours mean, of those that are there."""
    present = {"collective" if span.is_collective else span.name for span in spans}
    parts, x = [], _LEFT
    for name, color in {**_COLORS, "collective": _COLLECTIVE}.items():
        if name in present:
            told = {"data_wait": "waiting for data", "collective": "communication, waits included"}.get(name, name)
            told = told.replace("_", " ")
            parts.append(f'<rect x="{x}" y="30" width="14" height="14" fill="{color}"/>')
            parts.append(f'<text x="{x + 19}" y="41">{told}</text>')
            x += 40 + 7 * len(told)
    return parts


def _ruler(length_ms: float, y: int) -> list[str]:
    """Return marks at round times below the rows."""
    tick = 10.0 ** len(str(int(max(1.0, length_ms)))) / 10
    tick = next(part for part in (tick / 10, tick / 5, tick / 2, tick, tick * 2) if length_ms / part <= 12)
    parts = []
    for number in range(int(length_ms / tick) + 1):
        x = _LEFT + _WIDTH * number * tick / max(length_ms, 1e-9)
        parts.append(f'<path d="M{x:.1f} {_TOP - 4}V{y + 2}" stroke="#90a4ae" stroke-opacity="0.4"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{number * tick:g}</text>')
    return [*parts, f'<text x="8" y="{y + 16}">ms</text>']


def _bar(span: Span, x: float, y: int, width: float) -> str:
    told = " ".join([span.name, *(f"{key}={value}" for key, value in span.attributes.items())])
    told = escape(f"{told}: {(span.end - span.start) / 1e6:.3f} ms")
    top, height, color = y, _ROW, _COLORS.get(span.name, _COLLECTIVE)
    if span.is_collective:
        top, height, color = y + 2 * _ROW // 3, _ROW // 3, _COLLECTIVE
    width = max(width, 0.3)
    box = f'<rect x="{x:.2f}" y="{top}" height="{height}"'
    share = min(1.0, span.duration_s * 1e9 / max(1, span.end - span.start))
    bar = f'{box} fill="{color}" width="{width:.2f}"/>'
    if span.attributes.get("count", 1) > 1 and share < 1.0:
        # On its own row's ground; a collective lies on what it is in.
        pale = f'fill="{_PALE_COLLECTIVE}"' if span.is_collective else f'fill="{color}" fill-opacity="0.35"'
        bar = f'{box} {pale} width="{width:.2f}"/>{box} fill="{color}" width="{width * share:.2f}"/>'
    number = span.attributes.get("microbatch")
    label = ""
    if number is not None and width > 12:
        label = f'<text x="{x + width / 2:.2f}" y="{y + 13}" text-anchor="middle">{number}</text>'
    return f"<g><title>{told}</title>{bar}{label}</g>"


def draw_page(trace: Trace, report: Report, steps: Sequence[int], *, title: str) -> str:
    """Return the page: the picture, what was measured, and the run's curves.

    Args:
        trace: Spans of all ranks.
        report: Figures of the trace.
        steps: Numbers of the steps in the picture.
        title: Of the page.
    """
    lines = [*statements(report), *trace.remarks]
    is_merged = any(
        span.attributes.get("count", 1) > 1 and not span.is_collective
        for spans in trace.ranks.values()
        for span in _inside(spans, set(steps))
    )
    note = "A pale bar stands for several that are not told apart, and is filled as far as they took in all. " + (
        'With detail = "microbatch" the trace has each action of each micro-batch. ' if is_merged else ""
    )
    return "\n".join(
        [
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
            *(f"<p>{escape(line)}</p>" for line in lines),
            f'<div class="scroll">{draw_svg(trace, steps, title=_told(steps))}</div>',
            f'<p class="note">{escape(note)}Numbers are micro-batches. Rest the pointer on a bar to read it.</p>',
            _table(report),
            draw_curves(trace),
            "</body></html>",
            "",
        ]
    )


def _table(report: Report) -> str:
    rows = "".join(
        f"<tr{' class=slow' if rank == report.straggler and report.is_slow else ''}><th>rank {rank}</th>"
        + f"<td>{1e3 * times.step:.2f}</td>"
        + "".join(f"<td>{1e3 * value:.2f}</td><td>{value / times.step if times.step else 0:.0%}</td>" for value in own)
        + "</tr>"
        for rank, times in report.ranks.items()
        for own in [(times.computing, times.collectives, times.optimizer, times.data_wait)]
    )
    heads = ("computing", "exposed communication", "optimizer", "waiting for data")
    return (
        f"<h2>Where a step goes</h2><table><tr><th></th><th>step, ms</th>"
        f"{''.join(f'<th colspan=2>{head}, ms</th>' for head in heads)}</tr>{rows}</table>"
        f'<p class="note">Means of {_told(report.steps)}. Exposed communication is the time in which a rank does '
        "nothing else, waiting for slower ranks included.</p>"
    )


def _told(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
