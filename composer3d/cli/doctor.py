"""`composer3d doctor`: diagnosis of a run that failed, hangs or is slow, from its folder, and of its network."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType

from composer3d.cli.options import Subparsers, add_json, path, positive
from composer3d.cli.output import coloured, complain, say, say_json
from composer3d.errors import ComposerError

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
    parser.add_argument("run", type=path, metavar="RUN", help="the run's folder; with --network, or a manifest")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="of a run whose loss was not finite: run that step again from the newest checkpoint before it, on as many "
        "ranks of this machine, and find the first module whose output was not finite",
    )
    parser.add_argument(
        "--network",
        action="store_true",
        help="measure latency and bandwidth between the ranks of every axis of the manifest's mesh, with its backends, "
        "and name the links that are slow beside the others: on ranks of this machine, or as a rank under torchrun",
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="with --network: ranks to start; default: what the manifest's degrees multiply to",
    )
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Print the diagnosis of a run's folder; return 2 if the folder is not a run's."""
    if arguments.network:
        return _network(arguments)
    if arguments.world_size is not None:
        raise ComposerError("--world-size is for --network alone")
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


def _network(arguments: argparse.Namespace) -> int:
    """Print the links of every axis; return 0 for any finding."""
    from composer3d.diagnostics.network import probe

    if arguments.replay:
        raise ComposerError("--replay and --network are two questions; ask one of them")
    recorded = arguments.run / "manifest.toml"
    report = probe(str(recorded if recorded.is_file() else arguments.run), world_size=arguments.world_size)
    if report is None:  # another rank than the first
        return 0
    if arguments.json:
        say_json(report.to_json())
        return 0
    for line in report.lines():
        say(coloured(line, good=None) if line.startswith("slow:") else line)
    return 0
