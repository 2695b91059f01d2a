"""`composer3d check`: every problem of a manifest at once, or its ordered plan."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from composer3d.checking.check import Inspection, collected_rarely, device_of, inspect, open_manifest
from composer3d.checking.step_plan import StepRow, step_rows
from composer3d.cli.options import Subparsers, add_json, add_manifest, add_strict, natural, positive
from composer3d.cli.output import coloured, compress, print_problems, say, say_json
from composer3d.errors import ManifestError, OrderError, Problem

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
    told = _told(arguments)
    problems = [Problem(**problem) for problem in told["report"]["problems"]]
    if arguments.json:
        say_json({"ok": told["ok"], **told["report"]})
    else:
        if problems:
            print_problems(problems)
        if told["ok"]:
            say(coloured("\n".join(told["lines"]), good=True))
    return 0 if told["ok"] else 2


def _told(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Inspect, in a child where code of others runs, which may hang or end the process."""
    from composer3d.checking.foreign_problems import names_foreign_code, watched

    def look() -> Mapping[str, Any]:
        with contextlib.redirect_stdout(sys.stderr):  # what a user's module prints is no part of the answer
            found = _inspect(arguments)
            return _answer(found, _steps(found), arguments)

    if not names_foreign_code(arguments.manifest, arguments.overrides):
        return look()
    try:
        return watched(look, arguments.manifest, arguments.overrides)
    except ManifestError as error:
        return _answer(Inspection(problems=list(error.problems)), (), arguments)


def _answer(found: Inspection, steps: Sequence[StepRow], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what is said, as JSON values."""
    ok = found.ok(strict=arguments.strict)
    lines = _shown(found, steps, with_groups=arguments.rank is not None) if ok else []
    if ok and found.unknown is not None:
        lines.append(f"the first forward was not tried in full: {found.unknown}")
    return {"ok": ok, "report": _report(found, steps), "lines": lines}


def _inspect(arguments: argparse.Namespace) -> Inspection:
    try:
        inspected = open_manifest(arguments.manifest, arguments.overrides)
    except ManifestError as error:
        return Inspection(problems=list(error.problems))
    device = device_of(inspected.manifest)
    rank = arguments.rank or 0
    return inspect(inspected, world_size=arguments.world_size, rank=rank, device=device, forward=True)


def _steps(found: Inspection) -> list[StepRow]:
    """Return what happens in every step; actions that cannot be ordered are a problem."""
    if found.preparation is None or not found.ok(strict=False):
        return []
    try:
        return step_rows(found.preparation)
    except OrderError as error:
        found.problems.append(Problem(message=str(error)))
        return []


def _report(found: Inspection, steps: Sequence[StepRow]) -> dict[str, Any]:
    """Return what `--json` prints, but for `ok`."""
    preparation, layout = found.preparation, found.layout
    rows = preparation.plan if preparation is not None else ()
    return {
        "problems": [problem.to_json() for problem in found.ordered()],
        "first_forward": found.unknown or ("tried" if found.preparation is not None else "not tried"),
        "plan": [{"phase": row.phase, "name": row.name, "fqns": list(row.fqns)} for row in rows],
        "step": [{key: value for key, value in asdict(row).items() if key != "note" or value} for row in steps],
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


def _shown(found: Inspection, steps: Sequence[StepRow], *, with_groups: bool) -> list[str]:
    """Return the layout, the plan, and what happens in every step, as lines."""
    preparation = found.preparation
    assert preparation is not None, "without a problem there is a plan"
    context = preparation.context
    lines = [f"{context.layout} = {context.world_size} rank{'s' * (context.world_size > 1)} on {context.device.type}"]
    if with_groups:
        at = ", ".join(f"{axis}={index}" for axis, index in context.coordinates.items())
        lines.append(f"rank {context.rank}: {at}")
        for axis, ranks in _groups(preparation).items():
            if len(ranks) > 1:
                lines.append(f"{axis:<12} is of {len(ranks)} ranks: {_span(ranks)}")
    lines += [f"{row.phase:<12} {row.name:<24} {compress(row.fqns)}" for row in preparation.plan]
    if steps:
        lines.append("in every step:")
    return [*lines, *(f"  {step}" for step in steps)]
