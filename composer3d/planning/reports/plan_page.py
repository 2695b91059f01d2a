"""A plan as one page without anything from elsewhere: bars of memory and time, nodes, schedule, collectives."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from composer3d.planning.costs.allocator import memory_figures
from composer3d.planning.plan import Plan, RankPlan
from composer3d.planning.reports.plan_json import collective_rows
from composer3d.planning.reports.plan_text import band, memory_parts, shown_parts, size, time_lines
from composer3d.planning.schedules.drawing import draw_svg

__all__ = ["plan_to_html"]

_WIDTH, _ROW, _LEFT = 900, 34, 190
_CELL, _MOST_NODES, _NODE_COLUMNS, _DEFAULT_NODE = 44, 32, 4, 8
# Keys of a plan's time, with their colors; computing without the optimizer, which is within it there.
_PHASES = (("compute_s", "#4c72b0"), ("optimizer_s", "#8172b2"), ("exposed_s", "#c44e52"), ("bubble_s", "#ddd"))
_PHASE_NAMES = {
    "compute_s": "computing",
    "optimizer_s": "optimizer",
    "exposed_s": "communication exposed",
    "bubble_s": "bubble",
}
_STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:1200px}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
)


def plan_to_html(plan: Plan, *, title: str) -> str:
    """Return the page.

    Args:
        plan: From `plan_of`.
        title: Of the page.
    """
    schedule = ""
    if plan.pipeline is not None:
        drawing = draw_svg(plan.pipeline.schedule, title=f"{plan.schedule or 'pipeline'}, time in FLOPs")
        schedule = f'<h2>Schedule</h2><div style="overflow-x:auto">{drawing}</div>'
    verdict = f" - {plan.verdict}" if plan.verdict is not None else ""
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}{verdict}</h1>",
            f"<p>{escape(str(plan.layout))} = {plan.layout.world_size} ranks</p>",
            "<h2>Memory at the peak of each kind of rank</h2>",
            _memory(plan),
            *map(_figures, plan.ranks),
            "<h2>Ranks on nodes</h2>",
            _nodes(plan),
            schedule,
            *(_collectives(plan, index) for index in range(len(plan.ranks))),
            *(() if plan.time is None else _time(plan.time)),
            "<h2>Notes</h2><ul>",
            *(f"<li>{escape(note)}</li>" for note in (*plan.advice, *plan.notes)),
            "</ul></body></html>",
            "",
        ]
    )


def _svg(width: float, height: float, parts: list[str]) -> str:
    size_of = f'width="{width:.0f}" height="{height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size_of} font-size="12">{"".join(parts)}</svg>'


def _memory(plan: Plan) -> str:
    whole = max([plan.memory_bytes or 0, *(rank.allocation.total for rank in plan.ranks)])
    scale, parts = (_WIDTH - _LEFT - 20) / whole, []
    for row, rank in enumerate(plan.ranks):
        x, y = float(_LEFT), row * _ROW + 6
        parts.append(f'<text x="0" y="{y + 16}">rank {rank.trace.rank}, for {rank.trace.stands_for}</text>')
        for name, _, color in shown_parts(plan):
            value = memory_parts(rank)[name]
            width = max(value, 0) * scale
            told = f"<title>{name}: {size(value)}</title>"
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{color}">{told}</rect>')
            x += width
        parts.append(f'<text x="{min(x + 4, _WIDTH - 70):.1f}" y="{y + 16}">{size(rank.allocation.total)}</text>')
    bottom = len(plan.ranks) * _ROW
    if plan.memory_bytes is not None:
        x = _LEFT + plan.memory_bytes * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}" stroke="#c00" stroke-width="2"/>')
    for index, (name, _, color) in enumerate(shown_parts(plan)):
        x = float(_LEFT + index * 110)
        parts.append(f'<rect x="{x}" y="{bottom + 8}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 16}" y="{bottom + 19}">{name}</text>')
    return _svg(_WIDTH, bottom + 30, parts)


def _time(time: Mapping[str, Any]) -> list[str]:
    """Draw a step by phase, and below it its communication: what blocks, and what runs beside compute."""
    values = {key: time[key]["value"] for key, _ in _PHASES}
    values["compute_s"] -= values["optimizer_s"]
    messages = [
        (f"{row['op']} over {row['axis'] or 'the world'}", row["blocking_s"], row["seconds"])
        for row in time["communication"]
    ]
    scale = (_WIDTH - _LEFT - 90) / max([sum(values.values()), *(seconds for *_, seconds in messages)])
    x, parts = float(_LEFT), [f'<text x="0" y="22">{escape(time["hardware"])}: a step</text>']
    for key, color in _PHASES:
        width, told = values[key] * scale, f"<title>{_PHASE_NAMES[key]}: {values[key]:.3g} s</title>"
        parts.append(f'<rect x="{x:.1f}" y="6" width="{width:.1f}" height="24" fill="{color}">{told}</rect>')
        x += width
    parts.append(f'<text x="{x + 4:.1f}" y="22">{time["step_s"]["value"]:.3g} s</text>')
    for row, (name, blocking_s, seconds) in enumerate(messages, start=1):
        y = row * _ROW + 6
        parts.append(f'<text x="0" y="{y + 16}">{escape(name)}</text>')
        for begin, end, color, told in (
            (0.0, blocking_s, "#c44e52", "blocks"),
            (blocking_s, seconds, "#ccc", "beside compute"),
        ):
            box = f'x="{_LEFT + begin * scale:.1f}" y="{y}" width="{(end - begin) * scale:.1f}" height="24"'
            parts.append(f'<rect {box} fill="{color}"><title>{escape(name)}: {end - begin:.3g} s {told}</title></rect>')
        parts.append(f'<text x="{_LEFT + seconds * scale + 4:.1f}" y="{y + 16}">{seconds:.3g} s</text>')
    bottom = (len(messages) + 1) * _ROW
    for index, (key, color) in enumerate(_PHASES):
        x = float(_LEFT + index * 170)
        parts.append(f'<rect x="{x}" y="{bottom + 8}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 16}" y="{bottom + 19}">{_PHASE_NAMES[key]}</text>')
    drawing = _svg(_WIDTH, bottom + 30, parts)
    return ["<h2>Time of a step</h2>", drawing, *(f"<p>{escape(line)}</p>" for line in time_lines(time))]


def _figures(rank: RankPlan) -> str:
    """Return a table of a rank's bytes: how each is known, and between which bounds it lies."""
    rows = []
    for name, figure in memory_figures(rank.trace, rank.allocation).items():
        cells = (name.replace("_", " "), size(figure.value), band(rank, name), figure.known)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = f"<th>memory of rank {rank.trace.rank}</th><th>bytes</th><th>within</th><th>known</th>"
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _nodes(plan: Plan) -> str:
    """Draw the first nodes as boxes of ranks, colored by pipeline position and framed where they were traced."""
    per_node, world = plan.gpus_per_node or _DEFAULT_NODE, plan.layout.world_size
    num_nodes = -(-world // per_node)
    traced = {rank.trace.rank for rank in plan.ranks}
    parts, shown = [], min(num_nodes, _MOST_NODES)
    width, height = per_node * _CELL + 14, _CELL + 26
    for node in range(shown):
        x0, y0 = (node % _NODE_COLUMNS) * width, (node // _NODE_COLUMNS) * height
        parts.append(f'<text x="{x0}" y="{y0 + 12}">node {node}</text>')
        for place in range(min(per_node, world - node * per_node)):
            rank = node * per_node + place
            where = plan.layout.coordinates(rank)
            hue = 360 * where.get("pp", 0) / max(plan.layout.degrees.get("pp", 1), 1)
            frame = "#c00" if rank in traced else "#888"
            x, y = x0 + place * _CELL, y0 + 16
            told = f"<title>{escape(plan.layout.who(rank))}</title>"
            box = f'x="{x}" y="{y}" width="{_CELL - 4}" height="{_CELL - 4}" stroke="{frame}"'
            parts.append(f'<rect {box} fill="hsl({hue:.0f} 55% 80%)">{told}</rect>')
            parts.append(f'<text x="{x + 3}" y="{y + 24}" font-size="11">{rank}</text>')
    rest = f"<p>and {num_nodes - shown} nodes more</p>" if num_nodes > shown else ""
    assumed = "" if plan.gpus_per_node else f"<p>nodes of {_DEFAULT_NODE} are assumed: [mesh] gpus_per_node says</p>"
    rows = -(-shown // _NODE_COLUMNS)
    drawing = _svg(min(shown, _NODE_COLUMNS) * width, rows * height + 6, parts)
    return f'<div style="overflow-x:auto">{drawing}</div>{rest}{assumed}'


def _collectives(plan: Plan, index: int) -> str:
    trace = plan.ranks[index].trace
    columns = ("collective", "axis", "ranks", "of", "count", "bytes", "on the wire")
    head = "".join(f"<th>{name}</th>" for name in columns)
    rows = []
    for row in collective_rows(trace):
        cells = (
            row["op"],
            row["axis"] or "",
            row["num_ranks"],
            row["plugin"] or "core",
            row["count"],
            size(row["bytes"]),
            size(row["wire_bytes"]),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return f"<h2>Collectives of rank {trace.rank} in a step</h2><table><tr>{head}</tr>{''.join(rows)}</table>"
