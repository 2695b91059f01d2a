"""`composer3d doctor`: diagnosis of a run that failed, hangs or is slow, from its folder."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from composer3d.cli.options import Subparsers, add_json
from composer3d.cli.output import coloured, complain, say, say_json

__all__ = ["add", "execute"]

# Everything else that doctor finds is a fault.
_GOOD: Mapping[str, bool | None] = MappingProxyType({"ended": True, "running": True, "straggler": None})


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="say why a run failed, hangs or is slow",
        description="Read what a run left, or ask the ranks of one that hangs, and say who was first, what the others "
        "waited for, and what to try.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="of a run whose loss was not finite: run that step again from the newest checkpoint before it, on as many "
        "ranks of this machine, and find the first module whose output was not finite",
    )
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Print the diagnosis of what a run left; 2 if the folder is not one of a run."""
    from composer3d.diagnostics.doctor import examine, read_evidence, replayed

    evidence = read_evidence(arguments.run)
    if arguments.replay:
        evidence = replayed(evidence, report=complain)
    diagnosis = examine(evidence)
    if arguments.json:
        say_json(asdict(diagnosis))
        return 0
    say(coloured(diagnosis.first, good=_GOOD.get(diagnosis.kind, False)))
    for line in diagnosis.others:
        say(f"  {line}")
    for line in diagnosis.advice:
        say(f"try: {line}")
    return 0
