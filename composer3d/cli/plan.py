"""`composer3d plan`: memory, communication and time of a manifest's step, computed without its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer3d.cli.options import (
    Subparsers,
    add_json,
    add_overrides,
    amount,
    bandwidth,
    memory,
    natural,
    path,
    positive,
    price,
    seconds,
)
from composer3d.cli.output import PAGE, coloured, print_problems, refuse_unwritable, say, say_json, write_output
from composer3d.errors import ComposerError, ManifestError, Problem
from composer3d.processes import end_without_collecting

if TYPE_CHECKING:
    from composer3d.planning import Failures, Plan

__all__ = ["add", "execute"]

DOES_NOT_FIT, WRONG = 1, 2


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="say what a manifest costs: memory, collectives, bubble, per rank",
        description="Compose the manifest with its plugins and real degrees in one process, on ranks that do not "
        "exist and tensors without values, and trace one optimizer step: bytes of memory, collectives, operators, "
        "bubble. Exit code 1 if a rank does not fit into --memory.",
    )
    parser.add_argument(
        "manifests",
        metavar="MANIFEST",
        nargs="+",
        help="a path, or the name of a shipped manifest; of several a table, a row each",
    )
    add_overrides(parser)
    parser.add_argument(
        "--diff", metavar="OTHER", help="say what changes from MANIFEST to this one, by the largest difference"
    )
    parser.add_argument(
        "--world-size", type=positive, metavar="N", help="ranks of the run; default: what the degrees multiply to"
    )
    parser.add_argument(
        "--rank",
        type=_rank,
        default="worst",
        metavar="WHICH",
        help="worst: one of each distinct role; all: one of every pipeline position; or a number; default: worst",
    )
    parser.add_argument(
        "--memory",
        dest="memory_bytes",
        type=memory,
        metavar="SIZE",
        help="of a device, for example 80GiB: does it fit?",
    )
    parser.add_argument("--hardware", metavar="NAME", help="of a described cluster, or its file: how long a step takes")
    _add_questions(parser)
    parser.add_argument("--html", type=path, metavar="FILE", help="also write the plan as a page")
    parser.add_argument(
        "--routing-skew",
        type=amount,
        default=1.0,
        metavar="X",
        help="rows that the experts of the fullest rank are sent, over the mean of all ranks; default: 1, balanced",
    )
    parser.add_argument(
        "--full", action="store_true", help="trace every block, where two depths of equal blocks would do"
    )
    add_json(parser)
    parser.set_defaults(execute=execute)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    """Add the options of step time."""
    parser.add_argument("--tokens", type=amount, metavar="N", help="of a whole run, for example 2e12: days and cost")
    parser.add_argument("--samples", type=amount, metavar="N", help="the same, of a model that is given no tokens")
    parser.add_argument(
        "--price", type=price, metavar="P", help='of one device for an hour, such as 2.5 or "2.5 EUR", for the cost'
    )
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="PART=FACTOR",
        help="plan for a cluster that has another speed, or wait: flops, memory, links (in a node), network, latency, "
        "launch, host (the link to it), host_memory or drive, such as network=0.5x; may be repeated",
    )
    parser.add_argument(
        "--failures",
        type=amount,
        metavar="HOURS",
        help="of one device between two failures: goodput, how often to save",
    )
    parser.add_argument(
        "--storage", type=bandwidth, metavar="SIZE", help="what all ranks write in a second, such as 20GB"
    )
    parser.add_argument(
        "--restart", type=seconds, metavar="SECONDS", help="from a failure to the next step; default: 300"
    )


def _rank(text: str) -> str | int:
    try:
        return text if text in ("worst", "all") else natural(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor worst or all") from None


def execute(arguments: argparse.Namespace) -> int:
    """Plan, and print; 1 if it does not fit, 2 if the manifest is wrong."""
    from composer3d.checking import apart

    end_without_collecting()
    sources = list(arguments.manifests)
    _refuse_of_several(arguments, sources)
    if len(sources) == 1:
        refuse_unwritable(arguments.html, begins=PAGE)
    read = [*sources, *([] if arguments.diff is None else [arguments.diff])]
    made = apart(lambda: _made(arguments), read, arguments.overrides)
    for problems in made.problems:
        print_problems(problems)
    if made.problems:
        return WRONG
    if len(sources) > 1:
        return _table(arguments, made.plans)
    if arguments.diff is not None:
        return _diff(arguments, made.plans[sources[0]], made.other)
    return _alone(arguments, sources[0], made)


@dataclass(frozen=True, kw_only=True)
class _Made:
    """Plans of manifests, and the problems of those that have none, each with its own.

    Args:
        plans: By manifest.
        problems: Of a manifest, one entry each.
        worlds: Of one manifest that states several worlds, by what the reader calls them.
        other: Of the one that `--diff` names.
    """

    plans: Mapping[str, Plan]
    problems: Sequence[Sequence[Problem]] = ()
    worlds: Mapping[str, Plan] = field(default_factory=dict)
    other: Plan | None = None


def _made(arguments: argparse.Namespace) -> _Made:
    """Return the plans that the command shows, of manifests whose models are built in this process."""
    plans, problems = {}, []
    for source in arguments.manifests:
        try:
            plans[source] = _plan(arguments, source)
        except ManifestError as error:
            problems.append(error.problems)
    worlds: Mapping[str, Plan] = {}
    other = None
    if len(plans) == len(arguments.manifests) == 1:
        source, first = next(iter(plans.items()))
        try:
            if arguments.diff is not None:
                other = _plan(arguments, arguments.diff)
            else:
                worlds = _worlds(arguments, source, first)
        except ManifestError as error:
            problems.append(error.problems)
    return _Made(plans=plans, problems=problems, worlds=worlds, other=other)


def _alone(arguments: argparse.Namespace, source: str, made: _Made) -> int:
    """Show the plan of one manifest, and those of the worlds that it states."""
    found, worlds = made.plans[source], made.worlds
    if arguments.html is not None:
        from composer3d.planning.reports import plan_to_html

        write_output(arguments.html, plan_to_html(found, title=source))
    if arguments.json:
        from composer3d.planning.reports import plan_to_json, plans_to_json

        say_json(plan_to_json(found) | ({"worlds": plans_to_json(worlds)["plans"]} if worlds else {}))
    else:
        from composer3d.planning.reports import show_plan, show_plans

        say("\n".join(map(_coloured, show_plan(found).split("\n"))) if found.verdict is not None else show_plan(found))
        if worlds:
            say(f"\nevery stated world:\n{show_plans(worlds)}")
    return DOES_NOT_FIT if any(each.verdict == "does not fit" for each in (found, *worlds.values())) else 0


def _worlds(arguments: argparse.Namespace, source: str, largest: Plan) -> dict[str, Plan]:
    """Return the plans of the world sizes that a manifest states, where it states several and none was asked for.

    Of a range, its ends and those with a layout of their own.
    """
    from composer3d.manifest import inspect_manifest, read

    document = read(source, arguments.overrides)
    states = document.get(("run", "nodes")) or document.get(("mesh", "layouts"))
    if arguments.world_size is not None or not states:
        return {}  # known without the tables' types, which import torch
    from composer3d.runner import TABLES, world_sizes

    manifest = inspect_manifest(document, tables=TABLES).manifest
    sizes = world_sizes(manifest)
    if len(sizes) < 2:
        return {}
    chosen = [size for size in sizes if size in (sizes[0], sizes[-1]) or str(size) in manifest.mesh.layouts]
    plans = {f"on {size} ranks": _plan(arguments, source, world_size=size) for size in chosen[:-1]}
    return {**plans, f"on {sizes[-1]} ranks": largest}


def _coloured(line: str) -> str:
    """Return a line of the plan, coloured where it is the verdict."""
    good = {"fits [": True, "does not fit [": False, "tight [": None}
    return next((coloured(line, good=good[begin]) for begin in good if line.startswith(begin)), line)


def _failures(arguments: argparse.Namespace) -> Failures | None:
    """Return the failures that are to be expected; an answer on them needs all of its figures."""
    from composer3d.planning import Failures

    hours, storage = arguments.failures, arguments.storage
    if hours is None:
        if storage is not None or arguments.restart is not None:
            raise ComposerError("--storage and --restart need --failures: hours of one device between two failures")
        return None
    if storage is None:
        raise ComposerError("--failures needs --storage, such as 20GB: what ranks write in a second")
    if arguments.restart is None:
        return Failures(hours=hours, storage=storage)
    return Failures(hours=hours, storage=storage, restart_s=arguments.restart)


def _refuse_of_several(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse what is of one manifest where several are given, and one that is given twice."""
    if len(names) == 1:
        return
    alone = {"--diff": arguments.diff, "--html": arguments.html}
    refused = [option for option, value in alone.items() if value is not None]
    if refused:
        raise ComposerError(f"{refused[0]} is of one manifest, and {len(names)} are given")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ComposerError(f"{twice} is given twice")


def _table(arguments: argparse.Namespace, found: Mapping[str, Plan]) -> int:
    """Print a row for each of several plans."""
    if arguments.json:
        from composer3d.planning.reports import plans_to_json

        say_json(plans_to_json(found))
    else:
        from composer3d.planning.reports import show_plans

        say(show_plans(found))
    return DOES_NOT_FIT if any(plan.verdict == "does not fit" for plan in found.values()) else 0


def _diff(arguments: argparse.Namespace, plan: Plan, other: Plan | None) -> int:
    from composer3d.planning.reports import difference_to_json, show_difference

    assert other is not None, "planned without problems"
    if arguments.json:
        say_json(difference_to_json(plan, other))
    else:
        say(show_difference(plan, other))
    return DOES_NOT_FIT if other.verdict == "does not fit" else 0


def _plan(arguments: argparse.Namespace, source: str, *, world_size: int | None = None) -> Plan:
    """Return the plan of a manifest.

    Raises:
        ManifestError: It has problems.
    """
    from composer3d import plan
    from composer3d.planning.hardware import parse_factors

    money, currency = arguments.price or (None, "$")
    return plan(
        source,
        world_size=world_size or arguments.world_size,
        rank=arguments.rank,
        memory_bytes=arguments.memory_bytes,
        hardware=arguments.hardware,
        tokens=arguments.tokens,
        samples=arguments.samples,
        price=money,
        currency=currency,
        failures=_failures(arguments),
        what_if=parse_factors(arguments.what_if),
        overrides=arguments.overrides,
        full=arguments.full,
        routing_skew=arguments.routing_skew,
    ).plan
