"""Everything that can be known of a manifest before ranks are started: its problems, all of them, and its plan."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from composer3d.errors import ComposerError, ManifestError, NothingShared, Problem
from composer3d.processes import single_threaded

if TYPE_CHECKING:
    import torch

    from composer3d import ModelFindings
    from composer3d.composition import Preparation
    from composer3d.hooks import Hooks
    from composer3d.interfaces import Example
    from composer3d.manifest import InspectedManifest, Manifest
    from composer3d.mesh import Layout
    from composer3d.registry import Registered
    from composer3d.runner import ModelFactory

__all__ = ["Inspection", "collected_rarely", "device_of", "inspect", "open_manifest"]

_OBJECTS = 1_000_000  # that are new before reference cycles are looked for; Python's own number is 700


@dataclass(kw_only=True, eq=False)
class Inspection:
    """Findings of a check.

    Attributes:
        problems: Errors and warnings.
        layout: The degrees; None where they do not fit, or an axis has no owner.
        preparation: The manifest joined with the model; None where it could not be.
        unknown: Why nothing, or not all, is known of the run's first forward; None where all is.
        stand_in: The model that stands in for one that is not known here, as that of a manifest for `compose`; "" where
            none of those that were tried fits, and None where the model is known.
    """

    problems: list[Problem] = field(default_factory=list)
    layout: Layout | None = None
    preparation: Preparation | None = None
    unknown: str | None = None
    stand_in: str | None = None

    def ok(self, *, strict: bool) -> bool:
        """Return whether it can be run; under `strict` a warning counts like an error."""
        return not any(strict or problem.severity == "error" for problem in self.problems)

    def ordered(self) -> tuple[Problem, ...]:
        """Return the problems in the order of the file."""
        return ManifestError(self.problems).problems


class _CollectedRarely(contextlib.ContextDecorator):
    def __enter__(self) -> None:
        self._before = gc.get_threshold()
        gc.set_threshold(_OBJECTS, *self._before[1:])

    def __exit__(self, *unused: object) -> None:
        gc.set_threshold(*self._before)


def collected_rarely() -> _CollectedRarely:
    """Look for reference cycles seldom: nearly all that torch's import and a model on meta make stays.

    Of the CPU time of `check` for 80 blocks, looking took a fifth. For commands that compute nothing with values.

    Memory: what lies in cycles, of up to that many objects more.
    """
    return _CollectedRarely()


def open_manifest(source: str, overrides: Sequence[str]) -> InspectedManifest:
    """Read a manifest with the runner's tables and type it as far as possible.

    Raises:
        ManifestError: It cannot be read at all.
    """
    from composer3d.manifest import inspect_manifest, read
    from composer3d.runner import TABLES

    return inspect_manifest(read(source, overrides), tables=TABLES)


def device_of(manifest: Manifest, *, else_of: str | None = None) -> torch.device:
    """Return where the manifest's run computes: the device of `[run] device`, else the machine's accelerator.

    Args:
        manifest: Typed.
        else_of: Kind of device of another machine on which a run without a stated device would be.
    """
    import torch

    from composer3d.processes import default_device

    stated = manifest.tables["run"].device if "run" in manifest.tables else "auto"
    stated = else_of or "auto" if stated == "auto" else stated
    return default_device() if stated == "auto" else torch.device(stated)


@single_threaded()
def inspect(
    inspected: InspectedManifest,
    *,
    world_size: int | None,
    rank: int,
    device: torch.device,
    forward: bool = False,
    findings: ModelFindings | None = None,
) -> Inspection:
    """Find every problem that can be found without a process group and without weights.

    A mistake ends only the checks that depend on it: the data are read although the mesh does not fit. What is found in
    a table that has a mistake already is left out, since it may be the same one.

    Args:
        inspected: A manifest and its problems so far, from `open_manifest`.
        world_size: Ranks; None takes what the manifest's degrees multiply to.
        rank: Whose view is taken.
        device: Where the run would put parameters.
        forward: Also run a forward of two samples on the CPU, with weights, where nothing is wrong so far.
        findings: Of other layouts of the manifest, whose model is then not made again.
    """
    from composer3d.checking import rules
    from composer3d.checking.data_rules import data_problems
    from composer3d.checking.first_forward import first_forward_problems
    from composer3d.checking.layout_problems import layout_problems
    from composer3d.checking.sizes import local_checkpoint_problems, output_problems, schedule_problems
    from composer3d.hooks import Hooks
    from composer3d.runner import ModelTable

    result = Inspection(problems=list(inspected.problems))
    manifest = _with_tokens(_completed(inspected.manifest), result)
    tables = manifest.tables
    fitting: int | None = world_size
    try:
        hooks = Hooks(manifest.plugins)
    except ComposerError as error:
        result.problems.append(_at_named_table(str(error), manifest))
    else:
        fitting = _lay_out(result, inspected, hooks, world_size)
    layout, factory = result.layout, None
    found = [*output_problems(manifest), *schedule_problems(manifest), *local_checkpoint_problems(manifest)]
    found += [*data_problems(manifest), *rules.optimizer_problems(manifest)]
    if tables.keys() >= {"data", "train"} and isinstance(tables.get("model"), ModelTable):
        factory, more = _factory(manifest, findings)
        found += more
    if layout is not None and fitting == world_size and "train" in tables:
        found += rules.batch_problems(manifest, layout)
    if layout is not None and factory is not None:
        view = rank if rank < layout.world_size else 0
        size = None if fitting is None else layout.world_size
        found += _prepare(result, manifest, factory, world_size=size, rank=view, device=device, findings=findings)
    result.problems += _news(found, inspected)
    if forward and result.preparation is not None and factory is not None and result.ok(strict=False):
        result.problems += layout_problems(manifest, result.preparation)
        problems, result.unknown = first_forward_problems(manifest, factory, result.preparation)
        result.problems += problems
    return result


def _with_tokens(manifest: Manifest, result: Inspection) -> Manifest:
    """Return the manifest with what its tokenizer says of its tokens; where that is wrong, with data for any model."""
    from composer3d.runner import with_tokenizer

    try:
        return with_tokenizer(manifest)
    except ManifestError as error:
        result.problems += error.problems
        # What else may be wrong does not depend on the tokens.
        data = replace(manifest.tables["data"], use="synthetic", vocab_size=1, tokenizer=None, dtype=None)
        return replace(manifest, tables={**manifest.tables, "data": data})


def _at_named_table(message: str, manifest: Manifest) -> Problem:
    """Place a message at the first plugin table that it names."""
    paths = [(registered.info.family, registered.name) for registered in manifest.plugins]
    places = {message.find(f"[{family}.{name}]"): (family, name) for family, name in paths}
    named = [place for place in places if place >= 0]
    path = places[min(named)] if named else ("mesh",)
    # Its place is the problem's own.
    opening = next((f"{registered}: " for registered in manifest.plugins if message.startswith(f"{registered}: ")), "")
    return manifest.document.problem(path, message.removeprefix(opening), whole_table=True)


def _without_hooks(registered: Registered, manifest: Manifest) -> Problem:
    """Report a plugin that nothing would call."""
    message = f"{type(registered.instance).__name__} has no hook, so it does nothing"
    hint = "mark methods named like those of composer3d.hookspecs with @composer3d.hookimpl"
    path = (registered.info.family, registered.name)
    return manifest.document.problem(path, message, hint=hint, whole_table=True)


def _completed(manifest: Manifest) -> Manifest:
    """Return the manifest with a `[train]` that only lacked its number of steps, which nothing here depends on."""
    from composer3d.runner import TrainTable

    train = manifest.tables.get("train")
    if train is None or isinstance(train, TrainTable):
        return manifest
    return replace(manifest, tables={**manifest.tables, "train": TrainTable(steps=1, **asdict(train))})


def _lay_out(result: Inspection, inspected: InspectedManifest, hooks: Hooks, world_size: int | None) -> int | None:
    """Resolve the degrees; where only the world does not fit, go on with the one that the degrees multiply to."""
    from composer3d.composition import layout_of

    result.problems += [_without_hooks(registered, inspected.manifest) for registered in hooks.idle()]
    for size in dict.fromkeys((world_size, None)):
        try:
            result.layout = layout_of(inspected.manifest, hooks, world_size=size)
            return size
        except ManifestError as error:
            if inspected.unresolved and isinstance(error.__cause__, NothingShared):
                continue  # one whose table is wrong may share it
            # A plugin that was not found may own the axis that nobody seems to own.
            told = [problem for problem in error.problems if problem.key is None or not inspected.unresolved]
            result.problems += [problem for problem in told if problem not in result.problems]
    return None


def _factory(manifest: Manifest, findings: ModelFindings | None) -> tuple[ModelFactory | None, list[Problem]]:
    """Return the model's factory, or what is wrong with it; the same one for layouts that make the same model."""
    from composer3d.checking import rules

    if findings is None:
        return rules.find_factory(manifest)
    tables = manifest.tables
    model = [tables["model"], tables["data"], tables["train"].loss_table, tables["train"].frozen]
    key = ("factory", str(manifest.document.folder), manifest.train.seed, repr(model))
    return findings.once(key, lambda: rules.find_factory(manifest))


def _prepare(
    result: Inspection,
    manifest: Manifest,
    factory: ModelFactory,
    *,
    world_size: int | None,
    rank: int,
    device: torch.device,
    findings: ModelFindings | None,
) -> list[Problem]:
    """Join manifest and model, and collect every plugin's transforms."""
    from composer3d.checking.rules import name_problems, optimizer_answer_problems, step_problems
    from composer3d.checking.sizes import microbatch_problems, placement_problems
    from composer3d.composition import prepare

    try:
        model = factory.build()
        preparation = prepare(
            model,
            manifest,
            world_size=world_size,
            rank=rank,
            device=device,
            purpose="check",
            example=lambda: _foreseen_example(manifest),
            findings=findings,
        )
    except ManifestError as error:
        return list(error.problems)
    result.preparation = preparation
    own = [*name_problems(manifest, factory, preparation.context), *step_problems(manifest, preparation)]
    found = [*preparation.problems, *own]
    if any(problem.severity == "error" for problem in found):
        return found
    found += [*microbatch_problems(manifest, preparation), *placement_problems(manifest, preparation)]
    return [*found, *optimizer_answer_problems(manifest, preparation)]


def _foreseen_example(manifest: Manifest) -> Example | None:
    """Return what the run's first forward is called with, as far as that is known without opening the data."""
    from composer3d.runner.data import foreseen_example

    if "data" not in manifest.tables:
        return None
    return foreseen_example(
        manifest.tables["data"],
        manifest.document.folder,
        seed=manifest.train.seed,
        num_samples=manifest.train.microbatch or 1,
    )


def _news(problems: Sequence[Problem], inspected: InspectedManifest) -> list[Problem]:
    """Leave out what only follows from mistakes that are reported already."""
    wrong = {problem.table for problem in inspected.problems}
    missing = [f'"{name}"' for _, name in inspected.unresolved]
    return [
        problem
        for problem in problems
        if problem.table not in wrong and not any(name in problem.message for name in missing)
    ]
