"""`composer3d tune`: the suggestions measured on this machine, and the best one as a manifest."""

from __future__ import annotations

import argparse

from composer3d.cli.options import Subparsers, add_json, add_manifest, memory, path, positive
from composer3d.cli.output import complain, pasted, print_problems, refuse_unwritable, say, say_json
from composer3d.errors import ComposerError, ManifestError

__all__ = ["add", "execute"]


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "tune",
        help="measure the suggested layouts on this machine",
        description="Run a few real steps of every layout that suggest proposes, on this machine: all of them briefly, "
        "the faster half longer, and so on. Prints planned beside measured times, and writes the best as a manifest.",
    )
    add_manifest(parser)
    parser.add_argument("--nproc-per-node", type=positive, metavar="N", required=True, help="ranks of this machine")
    parser.add_argument(
        "--hardware", metavar="NAME|FILE", help="what to plan for; default: this machine, measured for half a minute"
    )
    parser.add_argument(
        "--memory",
        dest="memory_bytes",
        type=memory,
        metavar="SIZE",
        help="of a device; default: what the hardware's has",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY[=VALUE]",
        help="pin a choice, as for suggest; the precision is kept unless this says another",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=4,
        metavar="N",
        help="timed in the first round; default: 4; then twice as many",
    )
    parser.add_argument("--output", type=path, metavar="FILE", help="write the best as a manifest that extends this")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 if no layout could be measured, 2 if the manifest is wrong."""
    from composer3d.checking import build_apart
    from composer3d.planning import tune_on_machine

    if arguments.output is not None and arguments.output.exists():
        raise ComposerError(f"{arguments.output} is there, and would be replaced; name another file")
    refuse_unwritable(arguments.output)
    try:
        build_apart(arguments.manifest, arguments.overrides)
        result = tune_on_machine(
            arguments.manifest,
            num_ranks=arguments.nproc_per_node,
            hardware=arguments.hardware,
            memory_bytes=arguments.memory_bytes,
            keep=arguments.keep,
            overrides=arguments.overrides,
            num_steps=arguments.steps,
            report=complain,
        )
    except ManifestError as error:
        print_problems(error.problems)
        return 2
    if arguments.json:
        say_json(result.to_json())
    else:
        say(str(result))
    if arguments.output is not None and result.ok:
        result.write(arguments.output)
        if not arguments.json:
            run = f"composer3d run {pasted(arguments.output)} --nproc-per-node {arguments.nproc_per_node}"
            say(f"{arguments.output}: {run}")
    return 0 if result.ok else 1
