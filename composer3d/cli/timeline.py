"""`composer3d timeline`: spans of a run, drawn from its trace files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from composer3d.cli.options import Subparsers, add_json, path, positive
from composer3d.cli.output import DRAWING, PAGE, refuse_unwritable, say, say_json, write_output
from composer3d.errors import ComposerError

if TYPE_CHECKING:
    from composer3d.diagnostics.timeline import Report

__all__ = ["add", "execute"]


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "timeline",
        help="draw what a run did, from its trace files",
        description="Read the trace files that a profiling plugin wrote of a run; write a page that shows ranks by "
        "time, and say where the time went: bubble, exposed communication, straggler.",
    )
    parser.add_argument("run", type=path, metavar="RUN", help="the run's folder")
    parser.add_argument("--html", type=path, metavar="FILE", help="the page; default: timeline.html in the folder")
    parser.add_argument("--svg", type=path, metavar="FILE", help="also write the picture as SVG")
    parser.add_argument("--steps", type=positive, default=2, metavar="N", help="last steps that are drawn; default: 2")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Read, measure, draw; 2 if there is no trace."""
    from composer3d.diagnostics.timeline import draw_page, draw_svg, measure, read_trace, statements

    refuse_unwritable(arguments.html, begins=PAGE)
    refuse_unwritable(arguments.svg, begins=DRAWING)
    trace = read_trace(arguments.run)
    report = measure(trace)
    if not report.steps:
        raise ComposerError(f"{arguments.run}: no step is in the trace files of all ranks")
    drawn = report.steps[-arguments.steps :]
    title = f"{arguments.run.resolve().name}: {len(trace.ranks)} ranks"
    page = arguments.html or arguments.run / "timeline.html"
    write_output(page, draw_page(trace, report, drawn, title=title))
    if arguments.svg is not None:
        write_output(arguments.svg, draw_svg(trace, drawn, title=title))
    if arguments.json:
        say_json({**_report(report), "missing": list(trace.missing), "page": str(page)})
        return 0
    for rank, times in report.ranks.items():
        named = vars(times) | {"exposed communication": times.collectives}
        figures = ", ".join(
            f"{name.replace('_', ' ')} {1e3 * value:.1f} ms" for name, value in named.items() if name != "collectives"
        )
        say(f"rank {rank}: {figures}")
    for line in (*statements(report), *trace.remarks):
        say(line)
    say(str(page))
    return 0


def _report(report: Report) -> dict[str, Any]:
    return {
        "steps": list(report.steps),
        "ranks": {str(rank): vars(times) for rank, times in report.ranks.items()},
        "traffic": {str(rank): [vars(each) for each in sent] for rank, sent in report.traffic.items()},
        "straggler": {"rank": report.straggler, "ratio": report.straggler_ratio, "slow": report.is_slow},
        "exposed": report.exposed,
        "bubble": None if report.bubble is None else vars(report.bubble),
    }
