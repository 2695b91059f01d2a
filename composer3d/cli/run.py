"""`composer3d run`: check first, then train; under torchrun as a rank, otherwise with a local world of its own."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from composer3d.cli.options import Subparsers, add_manifest, add_strict, positive
from composer3d.cli.output import coloured, complain, print_problems, say
from composer3d.errors import ComposerError, LockError, ManifestError

if TYPE_CHECKING:
    from composer3d.runner import Outcome

__all__ = ["add", "execute"]

WRONG, FAILED = 2, 3


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        help="train what a manifest describes",
        description="Train what a manifest describes. Starts the ranks of this machine itself, or joins as a rank "
        "under torchrun: torchrun --nproc-per-node 8 -m composer3d run MANIFEST. Goes on from the newest checkpoint.",
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
    add_strict(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Join the world that torchrun has started, or start one."""
    from composer3d.runner.launcher import under_torchrun

    return _join(arguments) if under_torchrun() else _start(arguments)


def _join(arguments: argparse.Namespace) -> int:
    """Be one rank."""
    from composer3d.runner.start import join

    is_first = os.environ["RANK"] == "0"
    try:
        outcome = join(
            arguments.manifest, arguments.overrides, arguments.resume, strict=arguments.strict, report=complain
        )
    except LockError as error:
        complain(str(error))
        return FAILED
    if is_first:
        _tell(outcome)
    return 0


def _start(arguments: argparse.Namespace) -> int:
    """Check, then start the ranks of this machine and wait for them."""
    from composer3d.processes.child import ChildError
    from composer3d.runner.start import start, startable

    try:
        checked = startable(
            arguments.manifest,
            arguments.overrides,
            resume=arguments.resume,
            nproc_per_node=arguments.nproc_per_node,
            strict=arguments.strict,
        )
    except ManifestError as error:
        print_problems(error.problems)
        return WRONG
    except ChildError as error:
        complain(str(error))
        return FAILED
    if checked.problems:
        print_problems(checked.problems)
    if not checked.ok:
        return WRONG
    if checked.unknown is not None:
        complain(f"the first forward was not tried in full: {checked.unknown}")
    complain(f"starting {checked.num_ranks} rank{'s' * (checked.num_ranks > 1)} on {checked.device}")
    try:
        result = start(checked)
    except ComposerError as error:
        complain(str(error))
        return FAILED
    if result.failure is not None:
        complain(coloured(result.failure.render(Path(result.output)).rstrip(), good=False, stream=sys.stderr))
    elif result.outcome is not None:
        _tell(result.outcome)
    else:
        say(coloured(f"{result.status} before the first step", good=None))
    return result.exit_code


def _tell(outcome: Outcome) -> None:
    """Say how the run ended, where the trainer has not said it."""
    if outcome.status == "finished":
        loss = "" if outcome.loss is None else f", loss {outcome.loss:.4f}"
        say(coloured(f"finished: {outcome.step} steps{loss}; {outcome.output}", good=True))
