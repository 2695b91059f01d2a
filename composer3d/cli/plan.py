"""`composer3d plan`: what a manifest costs on every kind of rank, without the ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from composer3d.checking.check import Inspection, collected_rarely, inspect, open_manifest
from composer3d.cli.options import Subparsers, add_json, add_manifest, natural, positive, size
from composer3d.cli.output import print_problems, say, say_json
from composer3d.errors import ComposerError

if TYPE_CHECKING:
    from composer3d.manifest import InspectedManifest
    from composer3d.planning.costing import Budget
    from composer3d.planning.hardware.cluster import Hardware
    from composer3d.planning.plan import Plan
    from composer3d.planning.tracing.fake_composition import Job
    from composer3d.planning.tracing.rank_roles import RankChoice

__all__ = ["add", "execute", "plan_of"]

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
    add_manifest(parser)
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
    parser.add_argument("--memory", type=size, metavar="SIZE", help="of a device, for example 80GiB: does it fit?")
    parser.add_argument("--hardware", metavar="NAME", help="of a described cluster, or its file: how long a step takes")
    parser.add_argument("--tokens", type=_amount, metavar="N", help="of a whole run, for example 2e12: days and cost")
    parser.add_argument("--samples", type=_amount, metavar="N", help="the same, of a model that is given no tokens")
    parser.add_argument(
        "--price", type=_amount, metavar="P", help="of one device for an hour, in dollars, for the cost"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the plan as a page")
    parser.add_argument(
        "--full", action="store_true", help="trace every block, where two depths of equal blocks would do"
    )
    add_json(parser)
    parser.set_defaults(execute=execute)


def _rank(text: str) -> str | int:
    return text if text in ("worst", "all") else natural(text)


def _amount(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


@collected_rarely()
def execute(arguments: argparse.Namespace) -> int:
    """Plan, and print; 1 if it does not fit, 2 if the manifest is wrong."""
    plan = _plan(arguments, arguments.manifest)
    if plan is None:
        return WRONG
    if arguments.diff is not None:
        return _diff(arguments, plan)
    if arguments.html is not None:
        from composer3d.planning.reports.plan_page import plan_to_html

        _write(arguments.html, plan_to_html(plan, title=arguments.manifest))
    if arguments.json:
        from composer3d.planning.reports.plan_json import plan_to_json

        say_json(plan_to_json(plan))
    else:
        from composer3d.planning.reports.plan_text import show_plan

        say(show_plan(plan))
    return DOES_NOT_FIT if plan.verdict == "does not fit" else 0


def _diff(arguments: argparse.Namespace, plan: Plan) -> int:
    from composer3d.planning.reports.plan_difference import difference_to_json, show_difference

    other = _plan(arguments, arguments.diff)
    if other is None:
        return WRONG
    if arguments.json:
        say_json(difference_to_json(plan, other))
    else:
        say(show_difference(plan, other))
    return DOES_NOT_FIT if other.verdict == "does not fit" else 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ComposerError(f"{path}: cannot be written: {error.strerror}") from error


def _plan(arguments: argparse.Namespace, source: str) -> Plan | None:
    """Return the plan of a manifest; None after printing what is wrong with it."""
    import torch

    from composer3d.planning.costing import Budget
    from composer3d.planning.hardware.cluster import load_hardware

    _refuse_idle(arguments)
    hardware = None if arguments.hardware is None else load_hardware(arguments.hardware)
    inspected = open_manifest(source, arguments.overrides)
    # Ranks that do not exist compute nowhere; the CPU stands for any device.
    found = inspect(inspected, world_size=arguments.world_size, rank=0, device=torch.device("cpu"))
    if not found.ok(strict=False) or found.layout is None or found.preparation is None:
        print_problems(found.ordered())
        return None
    return plan_of(
        inspected,
        found,
        hardware=hardware,
        memory_bytes=arguments.memory,
        choice=arguments.rank,
        extrapolate=not arguments.full,
        budget_of=lambda unit: Budget(num_units=_amount_of(unit, arguments), price=arguments.price),
    )


def plan_of(
    inspected: InspectedManifest,
    found: Inspection,
    *,
    hardware: Hardware | None,
    memory_bytes: int | None = None,
    choice: RankChoice = "worst",
    extrapolate: bool = True,
    budget_of: Callable[[str], Budget] | None = None,
) -> Plan:
    """Plan a manifest that was inspected on the CPU, and without errors.

    Args:
        inspected: From `open_manifest`.
        found: From `inspect`.
        hardware: As for `make_plan`.
        memory_bytes: As for `make_plan`.
        choice: As for `make_plan`.
        extrapolate: As for `make_plan`.
        budget_of: The whole run, given the unit of the model's inputs.

    Raises:
        ComposerError: The form of its batches is not known beforehand, or it cannot be composed.
    """
    from composer3d.planning.plan import make_plan
    from composer3d.step.microbatches import units_of

    assert found.layout is not None and found.preparation is not None, "inspected without errors"
    job = _job(inspected, found)
    return make_plan(
        job,
        found.layout,
        orders_of=found.preparation.actions,
        schedule=_schedule_name(found),
        choice=choice,
        memory_bytes=memory_bytes,
        hardware=hardware,
        budget=None if budget_of is None else budget_of(units_of(job.example)[0]),
        extrapolate=extrapolate,
    )


def _job(inspected: InspectedManifest, found: Inspection) -> Job:
    """Return what is traced, with the form of its batches."""
    from composer3d.checking.rules import find_factory
    from composer3d.planning.tracing.job import job_of
    from composer3d.runner.data import foreseen_batch
    from composer3d.runner.tokenizer import with_tokenizer

    assert found.layout is not None, "inspected without errors"
    manifest = with_tokenizer(inspected.manifest)
    factory, problems = find_factory(manifest)
    assert factory is not None and not problems, "the inspection has found it"
    train = manifest.tables["train"]
    batch = foreseen_batch(
        manifest.tables["data"], manifest.document.folder, seed=train.seed, num_samples=train.microbatch or 1
    )
    if batch is None:
        file = manifest.document.file
        raise ComposerError(f"{file}: the form of a batch of [data] cannot be told without preparing the data")
    example, target = batch
    return job_of(
        manifest,
        factory,
        found.layout,
        example,
        target=target,
        has_targets=target is not None,
        preparation=found.preparation,
    )


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Refuse what would say nothing, before anything is composed."""
    amount = arguments.tokens or arguments.samples
    if (amount or arguments.price) and arguments.hardware is None:
        raise ComposerError("--tokens, --samples and --price need --hardware: without it there is no time")
    if arguments.price and not amount:
        raise ComposerError("--price needs --tokens, or --samples: how much there is to pay for")


def _amount_of(unit: str, arguments: argparse.Namespace) -> float | None:
    """Return how much a whole run sees, in the unit of its model's inputs."""
    other = "samples" if unit == "tokens" else "tokens"
    if getattr(arguments, other) is not None:
        raise ComposerError(f"--{other}: the model is given {unit}, and a run is as long as these; write --{unit}")
    amount: float | None = getattr(arguments, unit)
    return amount


def _schedule_name(found: Inspection) -> str | None:
    """Return what the plugin that owns the stages calls its schedule."""
    assert found.preparation is not None
    from composer3d.mesh import Role

    context = found.preparation.context
    owners = [context.owners[name] for name in context.layout.names(Role.STAGE) if name in context.owners]
    names = [getattr(owner.instance, "schedule", None) for owner in owners if context.layout.degree(Role.STAGE) > 1]
    return next((name for name in names if isinstance(name, str)), None)
