"""`verify`: the composition of a manifest on real ranks against one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking import Inspection, as_set, device_of, inspect, open_manifest, verb
from composer3d.errors import ComposerError, ManifestError, Problem
from composer3d.processes import refuse_side_thread, temporary_folder
from composer3d.verification.manifest_run import read_manifest, subject_of
from composer3d.verification.prove import prove
from composer3d.verification.proven_world import ProvenWorld, proven_world
from composer3d.verification.shrink import shrink
from composer3d.verification.verdict import Verdict
from composer3d.verification.verdict_report import to_json, to_text

if TYPE_CHECKING:
    from composer3d.runner import FailureReport

__all__ = ["VerificationError", "VerifyResult", "verify"]

WRONG, FAILED = 2, 3
# Mistakes that the ranks find themselves, by name: the composition does not hold, and the text says why.
_FOUND_BY_RANKS = frozenset({"StepError", "TransformError", "LossError", "InitialisationError", "BatchError"})


class VerificationError(ComposerError):
    """The ranks, or the one device, failed otherwise than by computing something else; nothing is proven.

    Attributes:
        exit_code: Of the command.
    """

    def __init__(self, message: str, *, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Failed(Exception):
    """Failure of the ranks, or with `alone` of the one device, which has no plugins; `report` describes it."""

    def __init__(self, report: FailureReport, *, alone: bool) -> None:
        super().__init__(report.message)
        self.report, self.alone = report, alone


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """Answer of `verify`.

    Args:
        verdict: Every difference, and its likely causes.
        problems: Warnings of the check.
    """

    verdict: Verdict
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether the composition computes what one device computes."""
        return self.verdict.ok

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d verify --json` prints."""
        return dict(to_json(self.verdict))

    def __str__(self) -> str:
        return to_text(self.verdict)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Arguments of `verify`."""

    manifest: str
    overrides: tuple[str, ...]
    steps: int
    max_blocks: int | None
    max_dim: int | None
    world_size: int | None
    max_ranks: int | None
    strict: bool
    report: Callable[[str], None]


@verb()
def verify(
    manifest: str | Path,
    *,
    steps: int = 2,
    max_blocks: int | None = None,
    max_dim: int | None = None,
    world_size: int | None = None,
    max_ranks: int | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    strict: bool = False,
    on_problems: Callable[[Sequence[Problem]], None] = lambda problems: None,
    report: Callable[[str], None] = lambda text: None,
) -> VerifyResult:
    """Compare a manifest's ranks with one device without plugins, in float64 and in the run's dtypes.

    Ranks are forked on a CPU, so it is called before this process computes with tensors, and in its main thread. What
    the caller has set up for its own tensors, as a default dtype or device, autocast or `torch.no_grad()`, plays no
    part, and is left as it was; so are the states of random numbers.

    Args:
        manifest: Path, or the name of a shipped manifest.
        steps: Optimizer steps to compare.
        max_blocks: Repeated blocks to keep; None keeps all.
        max_dim: The model's sizes and the sequence are halved until none is larger.
        world_size: Ranks of the run; default: 2 on a data-parallel axis that the manifest leaves open.
        max_ranks: Degrees are reduced until so many are enough; default: 8, and on GPUs as many as there are.
        overrides: `table.key=value`, as given to `--set`, or values by key.
        strict: Refuse warnings too.
        on_problems: Called with the check's warnings before ranks start.
        report: Called with each stage of the work as it begins.

    Raises:
        ManifestError: The manifest has problems, all of which it has.
        VerificationError: The ranks failed, or were interrupted.
        ForkError: This process has computed with tensors, so forked ranks would hang; or this is not its main thread.
        ComposerError: An argument is none that it takes.
    """
    refuse_side_thread()
    request = _Request(
        manifest=str(manifest),
        overrides=as_set(overrides),
        steps=steps,
        max_blocks=max_blocks,
        max_dim=max_dim,
        world_size=world_size,
        max_ranks=max_ranks,
        strict=strict,
        report=report,
    )
    with temporary_folder("verify") as folder:
        found = _looked(request, folder)
        problems = tuple(Problem(**problem) for problem in found["problems"])
        if not found["ok"]:
            raise ManifestError(problems)
        on_problems(problems)
        try:
            verdict = _prove(request, found, folder)
        except _Failed as failure:
            verdict = _judged(failure, found)
    return VerifyResult(verdict=verdict, problems=problems)


def _looked(request: _Request, folder: Path) -> dict[str, Any]:
    """Check in a child: this process only imports, and may fork ranks."""
    from composer3d.checking import problem_of
    from composer3d.processes import Child, ChildError, ForeignCodeError
    from composer3d.runner import warning_once

    try:
        return Child(lambda: warning_once(folder, _look, (request,))).result()
    except ForeignCodeError as error:
        raise ManifestError([problem_of(error, request.manifest, request.overrides)]) from error
    except ChildError as error:
        raise VerificationError(str(error)) from error


def _judged(failure: _Failed, found: dict[str, Any]) -> Verdict:
    """Return the verdict of ranks that refuse to go on; what else ended them is raised."""
    report = failure.report
    if report.error in _FOUND_BY_RANKS:
        return _refuted(report, found)
    alone = (
        "one device fails already, with no plugins but those that change numbers on purpose: the model, its data, its "
        "loss or one of these is to be mended\n"
    )
    text = (alone if failure.alone else "") + report.render().rstrip()
    raise VerificationError(text, exit_code=WRONG if report.exit_code == WRONG else FAILED)


def _prove(request: _Request, found: dict[str, Any], folder: Path) -> Verdict:
    overrides = (*request.overrides, *found["overrides"])
    device = found["device"]
    return prove(
        functools.partial(subject_of, request.manifest, overrides, found["max_blocks"], device, scratch=folder),
        layout=_layout(request.manifest, overrides),
        launch=functools.partial(_launch, folder, device, request.report),
        num_steps=request.steps,
        microbatches=found["microbatches"],
        grad_clip=found["grad_clip"],
        reduced=tuple(found["reduced"]),
        notes=tuple(found["notes"]),
    )


def _launch(
    folder: Path,
    device: str,
    report: Callable[[str], None],
    function: Callable[..., Any],
    args: Sequence[Any],
    num_ranks: int,
) -> list[Any]:
    """Start ranks as a run does."""
    from composer3d.runner import launch_local, warning_once
    from composer3d.verification.session import reference_rank

    alone = function is reference_rank
    report(
        "one device: forward, backward and steps in each dtype" if alone else f"{num_ranks} ranks: {function.__name__}"
    )
    kind: Any = "cpu" if device == "cpu" else "cuda"
    result = launch_local(warning_once, (folder, function, args), num_ranks=num_ranks, device=kind, output=folder)
    if result.report is not None:
        raise _Failed(result.report, alone=alone)
    if len(result.values) < num_ranks:
        raise VerificationError("interrupted: nothing is proven")
    return [result.values[rank] for rank in range(num_ranks)]


def _refuted(report: FailureReport, found: dict[str, Any]) -> Verdict:
    """Return the verdict on a composition whose ranks refused to go on."""
    return Verdict(
        evidence=None,
        failures=(f"the ranks do not get through a step: {report.error}",),
        diagnosis=(report.message,),
        reduced=tuple(found["reduced"]),
        notes=tuple(found["notes"]),
    )


def _layout(source: str, overrides: Sequence[str]) -> Any:
    from composer3d.composition import layout_of
    from composer3d.hooks import Hooks

    manifest = read_manifest(source, overrides)
    return layout_of(manifest, Hooks(manifest.plugins), world_size=None)


def _look(request: _Request) -> dict[str, Any]:
    """Check the manifest as it is, and as it is made smaller; JSON values."""
    from composer3d.mesh import Role

    try:
        inspected = open_manifest(request.manifest, request.overrides)
        where = device_of(inspected.manifest)
        max_ranks = _max_ranks(request, where.type)
        world = ProvenWorld()
        if not inspected.problems:
            world = proven_world(inspected.manifest, world_size=request.world_size, max_ranks=max_ranks)
            inspected = open_manifest(request.manifest, [*request.overrides, *world.overrides])
        found = inspect(inspected, world_size=None, rank=0, device=where)
        if not found.ok(strict=request.strict) or found.layout is None:
            return _refused(found)
        notes = [*world.notes]
        shrunk = shrink(inspected.manifest, found.layout, max_ranks=max_ranks, max_dim=request.max_dim)
        overrides = [*world.overrides, *shrunk.overrides, "data.workers=0"]
        if inspected.manifest.tables["optimizer"].in_backward:
            notes.append(
                "optimizer.in_backward, which frees the gradients that are compared, is used in the step after the load"
            )
        smaller = open_manifest(request.manifest, [*request.overrides, *overrides])
        checked = inspect(smaller, world_size=None, rank=0, device=device_of(smaller.manifest))
        if not checked.ok(strict=False) or checked.layout is None:
            return _refused(checked)
    except ManifestError as error:
        return {"ok": False, "problems": [problem.to_json() for problem in error.problems]}
    reduced = [*shrunk.reduced]
    blocks = _num_blocks(checked)
    keep = None if request.max_blocks is None else max(request.max_blocks, checked.layout.degree(Role.STAGE))
    if keep is not None and blocks > keep:
        reduced.append(f"blocks: {blocks} -> {keep}")
    train = smaller.manifest.tables["train"]
    return {
        "ok": True,
        "problems": [problem.to_json() for problem in found.ordered()],
        "overrides": overrides,
        "reduced": reduced,
        "notes": notes + _left_out(smaller.manifest),
        "device": where.type,
        "max_blocks": keep if keep is not None and blocks > keep else None,
        "microbatches": train.num_microbatches(checked.layout.degree(Role.BATCH)),
        "grad_clip": train.grad_clip,
    }


def _refused(found: Inspection) -> dict[str, Any]:
    return {"ok": False, "problems": [problem.to_json() for problem in found.ordered()]}


def _max_ranks(request: _Request, device: str) -> int:
    """Return how many ranks there may be on the machine's devices of a type."""
    import torch

    if device == "cpu":
        return request.max_ranks or 8
    available = torch.accelerator.device_count()
    if available == 0:
        raise ComposerError(f"this machine has no {device} device; verify on the CPU with --set run.device=cpu")
    return min(request.max_ranks or available, available)


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
