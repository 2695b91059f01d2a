"""`composer3d schedule`: a manifest's pipeline drawn, as text and as SVG."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking import collected_rarely, device_of, inspect, open_manifest
from composer3d.cli.options import Subparsers, add_json, add_manifest, positive
from composer3d.cli.output import print_problems, say, say_json
from composer3d.errors import ComposerError

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.planning import Costs, Simulation

__all__ = ["add", "execute"]

COSTS = {
    "forward": (1.0, "of a micro-batch's forward through a rank's stages"),
    "backward": (2.0, "of its backward"),
    "weight": (1.0, "of the backward the part that is the gradients of weights"),
    "transfer": (0.0, "of sending a micro-batch's hidden state, or its gradient, to another rank"),
}


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "schedule",
        help="draw a manifest's pipeline schedule",
        description="Simulate the actions that the run would execute, in the time that the costs say, and draw ranks "
        "by time: forward, backward, gradients of weights, idle. No process group, no weights.",
    )
    add_manifest(parser)
    parser.add_argument(
        "--world-size", type=positive, metavar="N", help="ranks of the run; default: what the degrees multiply to"
    )
    parser.add_argument(
        "--microbatches", type=positive, metavar="M", help="of one batch and rank; default: what [train] makes"
    )
    for name, (default, what) in COSTS.items():
        parser.add_argument(
            f"--{name}-cost", type=float, default=default, metavar="TIME", help=f"time {what}; default: {default:g}"
        )
    parser.add_argument("--width", type=positive, default=160, metavar="COLUMNS", help="of the text; default: 160")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the drawing as SVG")
    add_json(parser)
    parser.set_defaults(execute=execute)


@collected_rarely()
def execute(arguments: argparse.Namespace) -> int:
    """Simulate and draw; 2 if the manifest is wrong or has no pipeline."""
    inspected = open_manifest(arguments.manifest, arguments.overrides)
    found = inspect(inspected, world_size=arguments.world_size, rank=0, device=device_of(inspected.manifest))
    if not found.ok(strict=False) or found.preparation is None:
        print_problems(found.ordered())
        return 2
    num_microbatches = arguments.microbatches or _num_microbatches(found.preparation)
    from composer3d.planning import Costs, draw_svg, draw_text, simulate

    costs = Costs(**{name: getattr(arguments, f"{name}_cost") for name in COSTS})
    orders = found.preparation.actions(num_microbatches)
    if orders is None:
        raise ComposerError(
            f"{inspected.manifest.document.file}: there is no pipeline to draw: no axis of stages above 1"
        )
    simulation = simulate(orders, costs)
    if arguments.svg is not None:
        title = f"{inspected.manifest.document.file}: {len(orders)} ranks, {num_microbatches} micro-batches"
        _write(arguments.svg, draw_svg(simulation, title=title))
    if arguments.json:
        say_json(_report(simulation, num_microbatches, costs))
    else:
        say(draw_text(simulation, width=arguments.width))
    return 0


def _num_microbatches(preparation: Preparation) -> int:
    """Return how many micro-batches a rank's share of the global batch makes."""
    train, degree = preparation.context.manifest.train, preparation.context.data_parallel_degree
    size = train.microbatch or 1
    return max(1, (train.global_batch or size * degree) // (size * degree))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ComposerError(f"{path}: cannot be written: {error.strerror}") from error


def _report(simulation: Simulation, num_microbatches: int, costs: Costs) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "microbatches": num_microbatches,
        "stages_per_rank": simulation.stages_per_rank,
        "costs": {name: getattr(costs, name) for name in COSTS},
        "total": simulation.total,
        "bubble": {"share": simulation.bubble_share, "relative": simulation.bubble_relative},
        "in_flight": list(simulation.in_flight),
        "ranks": [
            [
                {
                    "kind": cell.action.kind,
                    "stage": cell.action.stage,
                    "microbatch": cell.action.microbatch,
                    "start": cell.start,
                    "end": cell.end,
                }
                for cell in cells
            ]
            for cells in simulation.ranks
        ],
    }
