"""`composer3d verify`: the composition on real ranks against one device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from composer3d.cli.options import Subparsers, add_json, add_manifest, add_strict, positive
from composer3d.cli.output import coloured, complain, print_problems, say, say_json
from composer3d.errors import ManifestError, Problem

__all__ = ["add", "execute"]

DIFFERS, WRONG = 1, 2


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "verify",
        help="prove that the composition computes what one device computes",
        description="Run the manifest's ranks and one device without plugins on the same weights and batches, and "
        "compare loss, gradient norm, every gradient and every updated parameter, in float64 and in the run's dtypes; "
        "copies, random streams and collectives too. Exit code 1 if something differs.",
    )
    add_manifest(parser)
    parser.add_argument("--steps", type=positive, default=2, metavar="N", help="optimizer steps; default: 2")
    parser.add_argument(
        "--max-blocks", type=positive, metavar="N", help="keep so many of the model's repeated blocks; default: all"
    )
    parser.add_argument(
        "--max-dim", type=positive, metavar="N", help="halve the model's sizes and the sequence until none is larger"
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="prove the run on N ranks; default: 2 on the data-parallel axis where the manifest leaves it open",
    )
    parser.add_argument(
        "--max-ranks",
        type=positive,
        metavar="N",
        help="reduce degrees until so many ranks are enough; default: 8, and on GPUs as many as there are",
    )
    add_strict(parser)
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Check in a child, then prove; 1 if it does not hold."""
    from composer3d import verify
    from composer3d.verification import VerificationError

    try:
        found = verify(
            arguments.manifest,
            steps=arguments.steps,
            max_blocks=arguments.max_blocks,
            max_dim=arguments.max_dim,
            world_size=arguments.world_size,
            max_ranks=arguments.max_ranks,
            overrides=arguments.overrides,
            strict=arguments.strict,
            on_problems=_show,
            report=_tell,
        )
    except ManifestError as error:
        print_problems(error.problems)
        return WRONG
    except VerificationError as error:
        complain(str(error))
        return error.exit_code
    if arguments.json:
        say_json(found.to_json())
    else:
        *lines, last = str(found).split("\n")
        say("\n".join([*lines, coloured(last, good=found.ok)]))
    return 0 if found.ok else DIFFERS


def _show(problems: Sequence[Problem]) -> None:
    if problems:
        print_problems(problems)


def _tell(what: str) -> None:
    """Report progress on a terminal."""
    if sys.stderr.isatty():
        complain(f"composer3d verify: {what.replace('_rank', '').replace('_', ' ')} ...")
