"""`composer3d verify`: the composition on real ranks against one device."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking.check import Inspection, device_of, inspect, open_manifest
from composer3d.cli.options import Subparsers, add_json, add_manifest, add_strict, positive
from composer3d.cli.output import coloured, complain, print_problems, say, say_json
from composer3d.errors import ComposerError, ManifestError, Problem

if TYPE_CHECKING:
    from composer3d.runner.failures import FailureReport
    from composer3d.verification import Verdict

__all__ = ["add", "execute"]

DIFFERS, WRONG, FAILED = 1, 2, 3
# Mistakes that the ranks find themselves, by name: the composition does not hold, and the text says why.
_FOUND_BY_RANKS = frozenset({"StepError", "TransformError", "LossError", "InitialisationError", "BatchError"})


class _Interrupted(Exception):
    """A signal ended the ranks before they were done."""


class _Failed(Exception):
    """The ranks failed; `report` says how, and `alone` that it was the one device, which has no plugins."""

    def __init__(self, report: FailureReport, *, alone: bool) -> None:
        super().__init__(report.message)
        self.report, self.alone = report, alone


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
    from composer3d.checking.foreign_problems import problem_of
    from composer3d.processes.child import Child, ChildError, ForeignCodeError
    from composer3d.runner.warnings_once import warning_once

    with tempfile.TemporaryDirectory(prefix="composer3d-verify-") as name:
        folder = Path(name)
        try:
            found = Child(lambda: warning_once(folder, _look, (arguments,))).result()
        except ForeignCodeError as error:
            print_problems([problem_of(error, arguments.manifest, arguments.overrides)])
            return WRONG
        except ChildError as error:
            complain(str(error))
            return FAILED
        if found["problems"]:
            print_problems([Problem(**problem) for problem in found["problems"]])
        if not found["ok"]:
            return WRONG
        return _report(arguments, found, folder)


def _report(arguments: argparse.Namespace, found: dict[str, Any], folder: Path) -> int:
    """Prove, and say what was found."""
    try:
        verdict = _prove(arguments, found, folder)
    except _Interrupted:
        complain("interrupted: nothing is proven")
        return FAILED
    except _Failed as failure:
        if failure.report.error not in _FOUND_BY_RANKS:
            if failure.alone:
                complain("one device without plugins fails already: the model, its data or its loss are to be mended")
            complain(failure.report.render().rstrip())
            return 2 if failure.report.exit_code == WRONG else FAILED
        verdict = _refuted(failure.report, found)
    from composer3d.verification import to_json, to_text

    if arguments.json:
        say_json(to_json(verdict))
    else:
        *lines, last = to_text(verdict).split("\n")
        say("\n".join([*lines, coloured(last, good=verdict.ok)]))
    return 0 if verdict.ok else DIFFERS


def _prove(arguments: argparse.Namespace, found: dict[str, Any], folder: Path) -> Verdict:
    from composer3d.verification import prove, subject_of

    overrides = (*arguments.overrides, *found["overrides"])
    device = found["device"]
    return prove(
        functools.partial(subject_of, arguments.manifest, overrides, found["max_blocks"], device, scratch=folder),
        layout=_layout(arguments.manifest, overrides),
        launch=functools.partial(_launch, folder, device),
        num_steps=arguments.steps,
        microbatches=found["microbatches"],
        grad_clip=found["grad_clip"],
        reduced=tuple(found["reduced"]),
        notes=tuple(found["notes"]),
    )


def _launch(folder: Path, device: str, function: Callable[..., Any], args: Sequence[Any], num_ranks: int) -> list[Any]:
    """Start ranks as a run does."""
    from composer3d.runner.launcher import launch_local
    from composer3d.runner.warnings_once import warning_once
    from composer3d.verification.session import reference_rank

    alone = function is reference_rank
    _tell(
        "one device: forward, backward and steps in each dtype" if alone else f"{num_ranks} ranks: {function.__name__}"
    )
    kind: Any = "cpu" if device == "cpu" else "cuda"
    result = launch_local(warning_once, (folder, function, args), num_ranks=num_ranks, device=kind, output=folder)
    if result.report is not None:
        raise _Failed(result.report, alone=alone)
    if len(result.values) < num_ranks:
        raise _Interrupted
    return [result.values[rank] for rank in range(num_ranks)]


def _tell(what: str) -> None:
    """Say at a terminal what runs now, since a proof takes a while."""
    if sys.stderr.isatty():
        sys.stderr.write(f"composer3d verify: {what.replace('_rank', '').replace('_', ' ')} ...\n")


def _refuted(report: FailureReport, found: dict[str, Any]) -> Verdict:
    """Return the verdict on a composition whose ranks refused to go on."""
    from composer3d.verification import Verdict

    return Verdict(
        evidence=None,
        failures=(f"the ranks do not get through a step: {report.error}",),
        diagnosis=(report.message,),
        reduced=tuple(found["reduced"]),
        notes=tuple(found["notes"]),
    )


def _layout(source: str, overrides: Sequence[str]) -> Any:
    from composer3d.composition.preparing import layout_of
    from composer3d.hooks import Hooks
    from composer3d.verification import read_manifest

    manifest = read_manifest(source, overrides)
    return layout_of(manifest, Hooks(manifest.plugins), world_size=None)


def _look(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the manifest as it is, and as it is made smaller; JSON values."""
    from composer3d.mesh import Role
    from composer3d.verification import ProvenWorld, proven_world, shrink

    try:
        inspected = open_manifest(arguments.manifest, arguments.overrides)
        where = device_of(inspected.manifest)
        max_ranks = _max_ranks(arguments, where.type)
        world = ProvenWorld()
        if not inspected.problems:
            world = proven_world(inspected.manifest, world_size=arguments.world_size, max_ranks=max_ranks)
            inspected = open_manifest(arguments.manifest, [*arguments.overrides, *world.overrides])
        found = inspect(inspected, world_size=None, rank=0, device=where)
        if not found.ok(strict=arguments.strict) or found.layout is None:
            return _refused(found)
        notes = [*world.notes]
        shrunk = shrink(inspected.manifest, found.layout, max_ranks=max_ranks, max_dim=arguments.max_dim)
        overrides = [*world.overrides, *shrunk.overrides, "data.workers=0"]
        if inspected.manifest.tables["optimizer"].in_backward:
            # It frees the gradients that are compared here.
            overrides.append("optimizer.in_backward=false")
            notes.append("with the ordinary optimizer step instead of optimizer.in_backward, whose gradients are freed")
        smaller = open_manifest(arguments.manifest, [*arguments.overrides, *overrides])
        checked = inspect(smaller, world_size=None, rank=0, device=device_of(smaller.manifest))
        if not checked.ok(strict=False) or checked.layout is None:
            return _refused(checked)
    except ManifestError as error:
        return {"ok": False, "problems": [problem.to_json() for problem in error.problems]}
    reduced = [*shrunk.reduced]
    blocks = _num_blocks(checked)
    keep = None if arguments.max_blocks is None else max(arguments.max_blocks, checked.layout.degree(Role.STAGE))
    if keep is not None and blocks > keep:
        reduced.append(f"blocks: {blocks} -> {keep}")
    train = smaller.manifest.tables["train"]
    per_rank = (train.global_batch or 0) // (checked.layout.degree(Role.BATCH) * (train.microbatch or 1))
    return {
        "ok": True,
        "problems": [problem.to_json() for problem in found.ordered()],
        "overrides": overrides,
        "reduced": reduced,
        "notes": notes + _left_out(smaller.manifest),
        "device": where.type,
        "max_blocks": keep if keep is not None and blocks > keep else None,
        "microbatches": per_rank or 1,
        "grad_clip": train.grad_clip,
    }


def _refused(found: Inspection) -> dict[str, Any]:
    return {"ok": False, "problems": [problem.to_json() for problem in found.ordered()]}


def _max_ranks(arguments: argparse.Namespace, device: str) -> int:
    """Return how many ranks there may be on the machine's devices of a type."""
    import torch

    if device == "cpu":
        return arguments.max_ranks or 8
    available = torch.accelerator.device_count()
    if available == 0:
        raise ComposerError(f"this machine has no {device} device; verify on the CPU with --set run.device=cpu")
    return min(arguments.max_ranks or available, available)


def _num_blocks(found: Inspection) -> int:
    from composer3d.errors import TransformError
    from composer3d.patterns import select

    assert found.preparation is not None, "without a problem there is one"
    context = found.preparation.context
    try:
        return len(select(context.blocks, context.fqns))
    except TransformError:
        return 0


def _left_out(manifest: Any) -> list[str]:
    """Say which plugins the float64 pass leaves out, and which axes are outside the contract."""
    precision = [plugin.name for plugin in manifest.plugins if plugin.info.family == "precision"]
    return [f"in float64 without {', '.join(precision)}, whose dtypes the second pass has"] if precision else []
