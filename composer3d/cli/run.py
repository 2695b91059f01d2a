"""`composer3d run`: check first, then train; under torchrun as a rank, otherwise with a local world of its own."""

from __future__ import annotations

import argparse
import os
import sys

from composer3d.cli.options import Subparsers, add_manifest, add_strict, natural, positive
from composer3d.cli.output import coloured, complain, print_problems, say
from composer3d.errors import ArgumentError, ComposerError, LockError, ManifestError, NodeZeroError, PlaceError

__all__ = ["add", "execute"]

WRONG, FAILED = 2, 3


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        help="train what a manifest describes",
        description="Train what a manifest describes. Starts the ranks of this machine itself, or joins as a rank "
        "under torchrun: torchrun --nproc-per-node 8 -m composer3d run MANIFEST. Groups of ranks that come and go are "
        "started on several machines by --nodes, --node-rank and --endpoint. Goes on from the newest checkpoint.",
    )
    add_manifest(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|never|PATH",
        default="auto",
        help="start from the newest checkpoint of the run if there is one (default), from new weights, or from PATH",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=positive,
        metavar="N",
        help="ranks to start here; default: what the degrees multiply to, and where one is open, this machine's GPUs",
    )
    parser.add_argument(
        "--nodes", type=positive, metavar="N", help="machines that groups of ranks which come and go are divided over"
    )
    parser.add_argument(
        "--node-rank",
        type=natural,
        metavar="K",
        help="number of this machine among them, from 0, which knows who is there",
    )
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT[,HOST:PORT...]",
        help="address of machine 0 by which the others reach it, and a free port; with those of machines 1, 2, ... "
        "after it, the next one takes over where the one that serves is lost. The environment variable "
        "COMPOSER3D_QUORUM_TOKEN is a secret of your own, the same on all of them",
    )
    add_strict(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Join the world that torchrun has started, or check and start one; print how it ended."""
    from composer3d import run
    from composer3d.runner import is_rank

    try:
        result = run(
            arguments.manifest,
            overrides=arguments.overrides,
            nproc_per_node=arguments.nproc_per_node,
            nodes=arguments.nodes,
            node_rank=arguments.node_rank,
            endpoint=arguments.endpoint,
            resume=arguments.resume,
            strict=arguments.strict,
            on_problems=print_problems,
            report=complain,
        )
    except (ManifestError, ArgumentError):
        raise  # a mistake of the user, unlike failures of the machine or of another run
    except PlaceError as error:  # a wrong command line
        complain(str(error))
        return WRONG
    except ComposerError as error:
        if is_rank() and not isinstance(error, LockError):
            raise
        complain(str(error))
        return os.EX_TEMPFAIL if isinstance(error, NodeZeroError) else FAILED
    if result.failure is not None:
        complain(coloured(str(result), good=False, stream=sys.stderr))
    elif result.exit_code == os.EX_TEMPFAIL:
        say(str(result))
    elif result.outcome is None:
        say(coloured(str(result), good=None))
    elif result.status == "finished" and (not is_rank() or os.environ["RANK"] == "0"):
        say(coloured(str(result), good=True))  # how others end the trainer has said
    return result.exit_code
