"""`composer3d schedule`: a manifest's pipeline schedule, simulated and drawn as text and as SVG."""

from __future__ import annotations

import argparse
from functools import partial

from composer3d.cli.options import Subparsers, add_json, add_manifest, path, positive
from composer3d.cli.output import DRAWING, refuse_unwritable, say, say_json, write_output

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
    parser.add_argument("--svg", type=path, metavar="FILE", help="also write the drawing as SVG")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Simulate and draw; 2 if the manifest is wrong or has no pipeline."""
    from composer3d.checking import apart
    from composer3d.planning import Costs, schedule

    refuse_unwritable(arguments.svg, begins=DRAWING)
    simulated = partial(
        schedule,
        arguments.manifest,
        world_size=arguments.world_size,
        overrides=arguments.overrides,
        num_microbatches=arguments.microbatches,
        costs=Costs(**{name: getattr(arguments, f"{name}_cost") for name in COSTS}),
    )
    found = apart(simulated, [arguments.manifest], arguments.overrides)
    if arguments.svg is not None:
        write_output(arguments.svg, found.to_svg())
    if arguments.json:
        say_json(found.to_json())
    else:
        say(found.to_text(width=arguments.width))
    return 0
