"""`composer3d check`: every problem of a manifest at once, or its ordered plan."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from composer3d.checking.check import Inspection, collected_rarely, device_of, inspect, open_manifest
from composer3d.cli.options import Subparsers, add_json, add_manifest, add_strict, natural, positive
from composer3d.cli.output import compress, print_problems, say, say_json
from composer3d.errors import ManifestError

if TYPE_CHECKING:
    from composer3d.composition.preparing import Preparation

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


@collected_rarely()
def execute(arguments: argparse.Namespace) -> int:
    """Check, and print; 2 if something is wrong."""
    with contextlib.redirect_stdout(sys.stderr):  # what a user's module prints is no part of the answer
        found = _inspect(arguments)
    ok = found.ok(strict=arguments.strict)
    if arguments.json:
        say_json({"ok": ok, **_report(found)})
    else:
        if found.problems:
            print_problems(found.ordered())
        if ok:
            _show(found, with_groups=arguments.rank is not None)
    return 0 if ok else 2


def _inspect(arguments: argparse.Namespace) -> Inspection:
    try:
        inspected = open_manifest(arguments.manifest, arguments.overrides)
    except ManifestError as error:
        return Inspection(problems=list(error.problems))
    device = device_of(inspected.manifest)
    rank = arguments.rank or 0
    return inspect(inspected, world_size=arguments.world_size, rank=rank, device=device, forward=True)


def _report(found: Inspection) -> dict[str, Any]:
    """Return what `--json` prints, but for `ok`."""
    preparation, layout = found.preparation, found.layout
    rows = preparation.plan if preparation is not None else ()
    return {
        "problems": [problem.to_json() for problem in found.ordered()],
        "plan": [{"phase": row.phase, "name": row.name, "fqns": list(row.fqns)} for row in rows],
        "world_size": None if layout is None else layout.world_size,
        "degrees": {} if layout is None else dict(layout.degrees),
        "coordinates": {} if preparation is None else dict(preparation.context.coordinates),
        "groups": {} if preparation is None else {axis: list(ranks) for axis, ranks in _groups(preparation).items()},
    }


def _groups(preparation: Preparation) -> dict[str, tuple[int, ...]]:
    """Return by axis the ranks that the rank in view meets along it."""
    context = preparation.context
    return {axis.name: context.layout.group(context.rank, axis.name) for axis in context.layout.axes}


def _span(ranks: Sequence[int]) -> str:
    """Write ascending ranks shortly: the ranks of a group are equally far from each other, or few."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) != 1 or len(ranks) < 3:
        return ", ".join(map(str, ranks))
    (step,) = steps
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")


def _show(found: Inspection, *, with_groups: bool) -> None:
    """Print the layout and the plan."""
    preparation = found.preparation
    assert preparation is not None, "without a problem there is a plan"
    context = preparation.context
    say(f"{context.layout} = {context.world_size} rank{'s' * (context.world_size > 1)} on {context.device.type}")
    if with_groups:
        say(f"rank {context.rank}: " + ", ".join(f"{axis}={index}" for axis, index in context.coordinates.items()))
        for axis, ranks in _groups(preparation).items():
            if len(ranks) > 1:
                say(f"{axis:<12} is of {len(ranks)} ranks: {_span(ranks)}")
    for row in preparation.plan:
        say(f"{row.phase:<12} {row.name:<24} {compress(row.fqns)}")
