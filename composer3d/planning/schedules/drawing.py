"""A simulated step as text and as SVG: ranks downwards, time to the right."""

from __future__ import annotations

from html import escape

from composer3d.planning.schedules.simulation import Cell, Simulation

__all__ = ["draw_svg", "draw_text"]

_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_COLORS = {"F": "#7fb2e5", "B": "#8fcf8f", "I": "#8fcf8f", "W": "#e8c16a"}
_IDLE = "#eceff1"
_ROW, _GAP, _LEFT, _TOP, _WIDTH, _LEAST = 26, 4, 70, 54, 1100, 9


def draw_text(simulation: Simulation, *, width: int = 160) -> str:
    """Draw a row for every rank.

    A cell is its letter and its micro-batch, `F3`, as wide as it takes time; in small letters on a rank's further
    stages. Points are idle.

    Args:
        simulation: A step.
        width: Columns that the rows may take; a step that does not fit is drawn with its letters alone.
    """
    least = min(cell.end - cell.start for cells in simulation.ranks for cell in cells if cell.end > cell.start)
    scale = 3.0 / least if simulation.total * 3.0 / least <= width else max(1.0 / least, width / simulation.total)
    margin = len(f"rank {len(simulation.ranks) - 1}")
    rows = []
    for rank, cells in enumerate(simulation.ranks):
        row = ["."] * round(simulation.total * scale)
        first = min(cell.action.stage for cell in cells)
        for cell in cells:
            start, end = round(cell.start * scale), round(cell.end * scale)
            row[start:end] = _label(cell, end - start, is_first=cell.action.stage == first)
        rows.append(f"{f'rank {rank}':<{margin}} |{''.join(row)}|")
    kinds = {cell.action.kind for cells in simulation.ranks for cell in cells}
    legend = ", ".join(f"{kind} {name}" for kind, name in _NAMES.items() if kind in kinds)
    further = "; small letters: the rank's further stages" if simulation.stages_per_rank > 1 else ""
    return "\n".join([*rows, f"{legend}, . idle{further}", *summary(simulation)])


def summary(simulation: Simulation) -> list[str]:
    """Return what the drawing shows, in numbers."""
    flights = ", ".join(f"{count:g}" for count in simulation.in_flight)
    return [
        f"step {simulation.total:g}, of which {max(simulation.busy):g} computing",
        f"bubble {simulation.bubble_share:.1%} of the step, {simulation.bubble_relative:.1%} of the ideal step without "
        "waiting",
        f"micro-batches in flight at most, by rank: {flights}",
    ]


def _label(cell: Cell, size: int, *, is_first: bool) -> str:
    kind = cell.action.kind if is_first else cell.action.kind.lower()
    text = f"{kind}{cell.action.microbatch}"
    return (text if len(text) <= size else kind[:size]).ljust(size, "-")


def draw_svg(simulation: Simulation, *, title: str) -> str:
    """Draw the same as an SVG picture; a cell's title says its stage and times.

    Args:
        simulation: A step.
        title: Above the picture.
    """
    least = min(cell.end - cell.start for cells in simulation.ranks for cell in cells if cell.end > cell.start)
    scale = max(_WIDTH / simulation.total, _LEAST / least)
    width = round(simulation.total * scale) + _LEFT + 20
    bottom = _TOP + len(simulation.ranks) * (_ROW + _GAP)
    texts = summary(simulation)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 20 * len(texts) + 10}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="8" y="20" font-size="15">{escape(title)}</text>',
        *_legend(simulation),
    ]
    for rank, cells in enumerate(simulation.ranks):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(_rectangle(_LEFT, y, simulation.total * scale, _IDLE))
        first = min(cell.action.stage for cell in cells)
        parts += [_cell(cell, y, scale, is_first=cell.action.stage == first) for cell in cells]
    parts += [f'<text x="8" y="{bottom + 18 + 20 * row}">{escape(text)}</text>' for row, text in enumerate(texts)]
    return "\n".join([*parts, "</svg>", ""])


def _legend(simulation: Simulation) -> list[str]:
    kinds = {cell.action.kind for cells in simulation.ranks for cell in cells}
    entries = [(name, _COLORS[kind]) for kind, name in _NAMES.items() if kind in kinds] + [("idle", _IDLE)]
    parts, x = [], _LEFT
    for name, color in entries:
        parts.append(f'<rect x="{x}" y="30" width="14" height="14" fill="{color}" stroke="#78909c"/>')
        parts.append(f'<text x="{x + 19}" y="41">{name}</text>')
        x += 40 + 6 * len(name)
    return parts


def _rectangle(x: float, y: int, width: float, color: str, rest: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW}" fill="{color}"{rest}/>'


def _cell(cell: Cell, y: int, scale: float, *, is_first: bool) -> str:
    x, width = _LEFT + cell.start * scale, (cell.end - cell.start) * scale
    action = cell.action
    told = f"{_NAMES[action.kind]} of micro-batch {action.microbatch}, stage {action.stage}, "
    told += f"{cell.start:g} to {cell.end:g}"
    # Further stages of a rank are drawn paler.
    rest = ' stroke="#78909c"' + ("" if is_first else ' fill-opacity="0.55"')
    label = f'<text x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle">{action.microbatch}</text>'
    return f"<g><title>{told}</title>{_rectangle(x, y, width, _COLORS[action.kind], rest)}{label}</g>"
