"""`composer3d check`: every problem of a manifest at once, or its ordered plan."""

from __future__ import annotations

import argparse

from composer3d.cli.options import Subparsers, add_json, add_manifest, add_strict, natural, positive
from composer3d.cli.output import coloured, print_problems, say, say_json
from composer3d.processes import end_without_collecting

__all__ = ["add", "execute"]


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "check",
        help="find every problem of a manifest, or print its ordered plan",
        description="Check a manifest against its model, its plugins and its data: no process group, no weights. "
        "Prints all problems with their lines, or what would be done to the model, in order.",
    )
    add_manifest(parser)
    parser.add_argument(
        "--world-size", type=positive, metavar="N", help="ranks of the run; default: what the degrees multiply to"
    )
    parser.add_argument(
        "--rank", type=natural, metavar="R", help="whose view to take, and whose groups to print; default: 0"
    )
    add_strict(parser)
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Check, and print; 2 if something is wrong."""
    from composer3d import check

    end_without_collecting()
    found = check(
        arguments.manifest,
        world_size=arguments.world_size,
        rank=arguments.rank,
        overrides=arguments.overrides,
        strict=arguments.strict,
    )
    if arguments.json:
        say_json(found.to_json())
    else:
        if found.problems:
            print_problems(found.problems)
        if found.ok:
            say(coloured("\n".join(found.lines), good=True))
    return 0 if found.ok else 2
