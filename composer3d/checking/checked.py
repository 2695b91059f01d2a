"""`check`: all problems of a manifest, or its ordered plan, as one value."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking.check import Inspection, collected_rarely, device_of, inspect, open_manifest
from composer3d.checking.fqn_ranges import compress
from composer3d.checking.stand_ins import inspect_any, stand_ins
from composer3d.checking.stated_worlds import world_size_problems
from composer3d.checking.step_plan import StepRow, step_rows
from composer3d.checking.verbs import as_set, verb
from composer3d.errors import ArgumentError, HookError, ManifestError, OrderError, PluginError, Problem
from composer3d.manifest import CORE_TABLES, MeshTable, fields
from composer3d.mesh import Role
from composer3d.registry import FAMILIES

if TYPE_CHECKING:
    from composer3d.composition import Preparation

__all__ = ["CheckResult", "check", "check_for_any_model"]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Answer of `check`.

    Args:
        ok: Whether the manifest can be run; with `strict` a warning counts like an error.
        problems: Errors and warnings, in the order of the file.
        report: Plan, actions of a step, degrees and groups, as JSON values.
        lines: The plan as text; empty where something is wrong.
    """

    ok: bool
    problems: tuple[Problem, ...]
    report: Mapping[str, Any]
    lines: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d check --json` prints."""
        return {"ok": self.ok, **self.report}

    def __str__(self) -> str:
        return "\n".join([*map(str, self.problems), *self.lines])


@verb()
@collected_rarely()
def check(
    manifest: str | Path,
    *,
    world_size: int | None = None,
    rank: int | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    strict: bool = False,
) -> CheckResult:
    """Find every problem of a manifest, or return the ordered plan of what would be done to the model.

    No process group, no weights. Code of others that the manifest names runs in a child process, which is ended where
    that code hangs. What the caller has set up for its own tensors, as a default dtype or device, autocast or
    `torch.no_grad()`, plays no part, and is left as it was; so are the states of random numbers.

    Args:
        manifest: Path, or the name of a shipped manifest.
        world_size: Ranks of the run; default: what the degrees multiply to.
        rank: Whose view is taken, and whose groups are in the text; default: rank 0, without its groups.
        overrides: `table.key=value`, as given to `--set`, or values by key.
        strict: Treat warnings as errors.

    Raises:
        ComposerError: An argument is none that it takes, or the world has no such rank.
    """
    from composer3d.checking.foreign_problems import names_foreign_code, watched

    source, overrides = str(manifest), as_set(overrides)

    def look() -> Mapping[str, Any]:
        with contextlib.redirect_stdout(sys.stderr):  # what a user's module prints is no part of the answer
            found = _inspect(source, overrides, world_size, rank or 0)
            return _answer(found, _steps(found), strict=strict, with_groups=rank is not None)

    try:
        answer = watched(look, source, overrides) if names_foreign_code(source, overrides) else look()
    except ManifestError as error:
        answer = _answer(Inspection(problems=list(error.problems)), (), strict=strict, with_groups=False)
    if rank is not None and rank >= (num_ranks := answer["num_ranks"] or math.inf):
        raise ArgumentError("rank", f"it is not in a world of {num_ranks} rank{'s' * (num_ranks > 1)}", value=rank)
    return _result(answer)


def _answer(found: Inspection, steps: Sequence[StepRow], *, strict: bool, with_groups: bool) -> dict[str, Any]:
    """Return the answer as JSON values, which leave a child."""
    ok = found.ok(strict=strict)
    lines = _shown(found, steps, with_groups=with_groups) if ok and found.preparation is not None else []
    if ok and found.stand_in == "":
        lines.append("for compose(): the loop has the model; the plan depends on it, and is not known here")
    if ok and found.unknown is not None:
        lines.append(f"the first forward was not tried in full: {found.unknown}")
    num_ranks = None if found.layout is None else found.layout.world_size
    return {"ok": ok, "report": _report(found, steps), "lines": lines, "num_ranks": num_ranks}


def check_for_any_model(manifest: str | Path, *, world_size: int | None, overrides: Sequence[str]) -> CheckResult:
    """Find the problems of a manifest whose model is not known: those that do not depend on it; see `check`.

    Args:
        manifest: Path.
        world_size: Ranks of the run; None is what the degrees multiply to.
        overrides: `table.key=value`, as given to `--set`.
    """
    found = _with_any_model(str(manifest), overrides, world_size, 0)
    return _result(_answer(found, _steps(found), strict=False, with_groups=False))


def _result(answer: Mapping[str, Any]) -> CheckResult:
    problems = tuple(Problem(**problem) for problem in answer["report"]["problems"])
    return CheckResult(ok=answer["ok"], problems=problems, report=answer["report"], lines=tuple(answer["lines"]))


def _with_any_model(source: str, overrides: Sequence[str], world_size: int | None, rank: int) -> Inspection:
    try:
        models = stand_ins(open_manifest(source, overrides).manifest)
    except ManifestError as error:
        return Inspection(problems=list(error.problems))
    return inspect_any(models, lambda more: _inspect(source, [*overrides, *more], world_size, rank))


def _inspect(source: str, overrides: Sequence[str], world_size: int | None, rank: int) -> Inspection:
    from composer3d.runner import world_sizes

    try:
        inspected = open_manifest(source, overrides)
        if _is_of_a_loop(inspected.manifest.document.tables):
            return _with_any_model(source, [*overrides, "train.steps=1"], world_size, rank)
    except ManifestError as error:
        return Inspection(problems=list(error.problems))
    device = device_of(inspected.manifest)
    size = world_size or max(world_sizes(inspected.manifest), default=None)
    found = inspect(inspected, world_size=size, rank=rank, device=device, forward=True)
    found.problems += world_size_problems(inspected, world_size=size, device=device, known=found.problems)
    return found


def _is_of_a_loop(tables: Mapping[str, Any]) -> bool:
    """Return whether a manifest is one for `compose`: plugins, and nothing that only a run uses.

    One of a run at least states its model or its data; a loop has these, and its number of steps, itself.
    """
    own = {name: set(table) for name, table in tables.items() if isinstance(table, Mapping) and name not in FAMILIES}
    stated = {name: keys - set(fields(CORE_TABLES.get(name, MeshTable))) for name, keys in own.items()}
    is_plugins = all(name in (*FAMILIES, *CORE_TABLES) for name in tables) and any(name in tables for name in FAMILIES)
    return is_plugins and not any(keys for name, keys in stated.items() if name != "mesh")


def _steps(found: Inspection) -> list[StepRow]:
    """Return what happens in every step; actions that cannot be ordered, or declared, are a problem."""
    from composer3d.checking.foreign_problems import problem_of_hook

    if found.preparation is None or not found.ok(strict=False):
        return []
    document = found.preparation.context.manifest.document
    try:
        return step_rows(found.preparation)
    except OrderError as error:
        found.problems.append(Problem(message=str(error)))
    except HookError as error:
        found.problems.append(problem_of_hook(error, document))
    except PluginError as error:  # of the model: what it wants to do in every step
        found.problems.append(document.problem(("model", "use"), str(error)))
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
        "world_size": None if layout is None else layout.num_ranks,
        "degrees": {} if layout is None else dict(layout.degrees),
        "coordinates": {} if preparation is None else dict(preparation.context.coordinates),
        "groups": {} if preparation is None else {axis: list(ranks) for axis, ranks in _groups(preparation).items()},
    }


def _groups(preparation: Preparation) -> dict[str, tuple[int, ...]]:
    """Return by axis the ranks of its world that the rank in view meets along it."""
    context = preparation.context
    axes = [axis.name for axis in context.layout.axes if axis.role is not Role.REPLICA]
    return {name: context.layout.group(context.rank, name) for name in axes}


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
    num_ranks = context.layout.num_ranks
    lines = [f"{context.layout} = {num_ranks} rank{'s' * (num_ranks > 1)} on {context.device.type}"]
    if with_groups:
        at = ", ".join(f"{axis}={index}" for axis, index in context.coordinates.items())
        lines.append(f"rank {context.rank}: {at}")
        for axis, ranks in _groups(preparation).items():
            if len(ranks) > 1:
                lines.append(f"{axis:<12} is of {len(ranks)} ranks: {_span(ranks)}")
    if found.stand_in:
        lines.append(f"for compose(): the loop has the model; this plan is that of {found.stand_in}")
    lines += [f"{row.phase:<12} {row.name:<24} {compress(row.fqns)}" for row in preparation.plan]
    if steps:
        lines.append("in every step:")
    return [*lines, *(f"  {step}" for step in steps)]
