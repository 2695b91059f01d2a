"""Preparation: everything about a composition that is known before a process group, a mesh or a weight exists.

`check` stops here; `compose` goes on from here. Mistakes are collected, not raised one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from composer3d import initialisation, mesh, patterns
from composer3d.composition.blocks import find_blocks, left_out
from composer3d.composition.composed_model.embeddings import other_embeddings, unsuitable_embeddings
from composer3d.composition.composed_model.second_derivatives import ADVICE, exchanging_axes, find_second_derivative
from composer3d.composition.composed_model.unsuitable_models import refuse_unsuitable
from composer3d.composition.error_places import asking, at_plugin, located, named_in
from composer3d.composition.model_findings import ModelFindings
from composer3d.context import Purpose, RunContext
from composer3d.errors import ComposerError, ManifestError, Problem, TransformError, did_you_mean
from composer3d.hooks import Hooks, blamed, blamed_listing
from composer3d.initialisation import Attachments, WeightsOnDisk
from composer3d.mesh import Layout, Role
from composer3d.registry import Catalogue, Registered
from composer3d.replicas import ranks_of_group
from composer3d.transform import Phase, Transform, resolve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.initialisation import Recipe
    from composer3d.interfaces import Action, Example
    from composer3d.manifest import Document, Manifest

__all__ = ["PlanRow", "Preparation", "prepare"]


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One line of the plan: a transform, its phase, and the modules that it selected."""

    phase: str
    name: str
    fqns: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(fqn or "(root)" for fqn in self.fqns[:3])
        more = f", ... {len(self.fqns)} in all" if len(self.fqns) > 3 else ""
        return f"{self.phase:<12} {self.name:<24} {shown}{more}"


@dataclass(kw_only=True, eq=False)
class Preparation:
    """A manifest joined with a model.

    Attributes:
        context: The run as plugins see it.
        hooks: The plugins.
        model: On meta where it was made by a factory.
        recipe: Initialisation of its weights; None where the model came with weights.
        attachments: Attributes and hooks of its parameters.
        selected: The ordered transforms with the FQNs each selected on the whole model.
        declared_by: The plugin of each transform, by its name.
        problems: Every mistake found.
    """

    context: RunContext
    hooks: Hooks
    model: nn.Module
    recipe: Recipe | None
    attachments: Attachments
    selected: list[tuple[Transform, tuple[str, ...]]] = field(default_factory=list)
    declared_by: dict[str, Registered] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def plan(self) -> tuple[PlanRow, ...]:
        """The ordered plan."""
        rows: list[PlanRow] = []
        for transform, fqns in self.selected:
            parts = {"": fqns} if transform.rows is None else transform.rows(self.context)
            rows += (
                PlanRow(phase=transform.phase.name, name=transform.name + (label and f".{label}"), fqns=tuple(part))
                for label, part in parts.items()
            )
        return tuple(rows)

    def actions(self, num_microbatches: int) -> Sequence[Sequence[Action]] | None:
        """Return the actions of every rank of the pipeline, in order; None without one."""
        return self.hooks.actions(self.context, num_microbatches)


def layout_of(manifest: Manifest, hooks: Hooks, *, world_size: int | None, of_all_groups: bool = True) -> Layout:
    """Resolve the manifest's degrees.

    Args:
        manifest: Of the run.
        hooks: Its plugins.
        world_size: Ranks; None takes what the degrees multiply to, or the largest world of `[mesh] layouts`.
        of_all_groups: Whether these are those of all groups, where axes of role REPLICA have several.

    Raises:
        ManifestError: At the line of `[mesh]`, for degrees that do not fit the world and axes that nobody owns.
    """
    document, infos = manifest.document, [registered.info for registered in hooks.plugins]
    try:
        owners = hooks.owners()
        axes = mesh.arrange([axis for info in infos for axis in info.axes])
        _refuse_unknown_axes(owners, [axis.name for axis in axes], document)
        batch = [axis.name for axis in axes if axis.role is Role.BATCH]
        default = next((info.owns[0] for info in infos if info.owns and info.owns[0] in batch), None)
        world_size = world_size or max(map(int, manifest.mesh.layouts), default=None)
        stated = manifest.degrees_on(world_size)
        if of_all_groups and world_size is not None:
            world_size = ranks_of_group(stated, axes=axes, num_ranks=world_size)
        layout = mesh.resolve(stated, axes=axes, world_size=world_size, default=default)
    except ManifestError:
        raise
    except ComposerError as error:
        raise ManifestError([document.problem(("mesh",), str(error), whole_table=True)]) from error
    ownerless = [
        document.problem(
            ("mesh", name),
            f'{name} = {degree}, but no plugin of this manifest owns the axis "{name}"',
            hint=Catalogue.installed().owner_hint(name),
        )
        for name, degree in layout.degrees.items()
        if degree > 1 and name not in owners
    ]
    if ownerless:
        raise ManifestError(ownerless)
    return layout


def _refuse_unknown_axes(owners: Mapping[str, Registered], known: Sequence[str], document: Document) -> None:
    """Refuse plugins that own what is no axis.

    Raises:
        ManifestError: At their tables.
    """
    problems = [
        document.problem(
            (owner.info.family, owner.name),
            f'{owner.name} owns "{name}", which is no axis of the mesh, and none that a plugin of this manifest adds',
            hint=did_you_mean(name, known),
            whole_table=True,
        )
        for name, owner in owners.items()
        if name not in known
    ]
    if problems:
        raise ManifestError(problems)


def prepare(
    model: nn.Module | Callable[[], nn.Module],
    manifest: Manifest,
    *,
    world_size: int | None,
    rank: int,
    device: torch.device,
    purpose: Purpose,
    example: Example | Callable[[], Example | None] | None = None,
    findings: ModelFindings | None = None,
) -> Preparation:
    """Join a manifest with a model, without a process group and without weights.

    Args:
        model: A module, or a factory that is run once on meta; see `WeightsOnDisk`.
        manifest: Read and typed.
        world_size: Ranks of a group; None takes what the manifest's degrees multiply to.
        rank: Global rank whose view is prepared.
        device: Of the run's parameters.
        purpose: As of `compose`.
        example: `(args, kwargs)` of a forward, for plugins that need shapes, or what makes it.
        findings: Of other layouts of the same factory's model.

    Raises:
        ManifestError: The mesh does not fit, or the factory fails; everything else is in `problems`.
    """
    from torch import nn

    hooks = Hooks(manifest.plugins)
    layout = layout_of(manifest, hooks, world_size=world_size, of_all_groups=False)
    recipe, findings = None, findings or ModelFindings()
    if not isinstance(model, nn.Module):
        model, recipe = findings.model_of(model, functools.partial(_record, model, manifest))
    refuse_unsuitable(model, is_alone=layout.world_size == 1)
    context = RunContext(
        purpose=purpose,
        manifest=manifest,
        device=device,
        rank=rank,
        layout=layout,
        owners=hooks.owners(),
        hooks=hooks,
        blocks=manifest.model.blocks or find_blocks(model),
    )
    context.stash(ModelFindings).join(findings)
    context.set_example(example)
    context.fqns = tuple(fqn for fqn, _ in model.named_modules())
    context.uncalled = frozenset(fqn for fqn, module in model.named_modules() if not _has_forward(module))
    context.parameter_fqns = tuple(fqn for fqn, _ in model.named_parameters(remove_duplicate=False))
    context.parameter_forms = {
        fqn: p.detach().to("meta").requires_grad_(p.requires_grad) for fqn, p in model.named_parameters()
    }
    context.ties = initialisation.ties(model)
    attachments = Attachments.of(model)
    preparation = Preparation(context=context, hooks=hooks, model=model, recipe=recipe, attachments=attachments)
    _find_problems(preparation)
    return preparation


def _record(factory: Callable[[], nn.Module], manifest: Manifest) -> tuple[nn.Module, Recipe]:
    """Run a factory on meta; return its module, and how its weights come to be.

    Raises:
        ManifestError: It fails, or the weights on disk are not its model's.
    """
    try:
        model, recipe = initialisation.record(factory)
        if isinstance(factory, WeightsOnDisk):
            recipe.source = factory.open_weights(model)
    except ManifestError:
        raise
    except ComposerError as error:
        raise ManifestError([manifest.document.problem(("model", "use"), str(error))]) from error
    return model, recipe


def _has_forward(module: nn.Module) -> bool:
    from torch import nn

    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _find_problems(preparation: Preparation) -> None:
    context, problems = preparation.context, preparation.problems
    document = context.manifest.document
    if context.manifest.model.blocks:
        with located(problems, lambda error: document.problem(("model", "blocks"), str(error))):
            patterns.select(context.manifest.model.blocks, context.fqns)
    for registered in preparation.hooks.plugins:
        problems += _device_problems(registered, context)
    with located(problems, lambda error: document.problem(("mesh",), str(error), whole_table=True)):
        for registered, function in preparation.hooks.configure():
            with asking(problems, registered, context):
                function(context=context)
    for registered, function in preparation.hooks.asked("composer3d_layout") if context.purpose == "check" else ():
        with asking(problems, registered, context):
            function(degrees=context.degrees)
    if context.world_size > 1:
        has_stages = context.layout.degree(Role.STAGE) > 1
        for message in preparation.attachments.inexact(has_stages=has_stages, device=context.device):
            problems.append(document.problem(("model", "use"), message))
    if not problems:
        _select(preparation)
    problems += _unreduced(preparation) if not problems else []
    axes = exchanging_axes(context.layout)
    if axes and (found := find_second_derivative(preparation.model)) is not None:
        message = (
            f"{found}, and what ranks of {axes[0]} exchange in a backward is in no graph: gradients would be wrong"
        )
        problems.append(document.problem(("mesh", axes[0]), message, hint=ADVICE))
    model, layout = preparation.model, context.layout
    problems += [document.problem(("model", "use"), message) for message in unsuitable_embeddings(model, layout)]
    for message in other_embeddings(model, layout):
        problems.append(document.problem(("model", "use"), message, severity="warning"))
    per_node = context.manifest.mesh.gpus_per_node
    for name in mesh.crossings(context.layout, per_node) if per_node else ():
        message = f"{name} = {context.degrees[name]} reaches over the edge of a node of {per_node} GPUs"
        problems.append(document.problem(("mesh", name), message, severity="warning"))
    for routed in [] if context.manifest.model.blocks else left_out(preparation.model):
        message = (
            f"{routed.place} calls entries of {routed.fqn} by the values of a tensor, so that a rank may leave out "
            "what another calls: they are not taken for the model's blocks"
        )
        hint = f'[model] blocks = "{routed.fqn}.*" takes them, where every rank calls all of them'
        problems.append(document.problem(("model", "use"), message, hint=hint, severity="warning"))


def _unreduced(preparation: Preparation) -> list[Problem]:
    """Refuse sequences that are sharded where nobody averages the gradients of their shards."""
    context = preparation.context
    averaged = {axis for transform, _ in preparation.selected for axis in transform.averages}
    return [
        context.manifest.document.problem(
            ("mesh", name),
            f"{name} = {context.degrees[name]} shards sequences, and no plugin of this manifest averages gradients "
            f"over {name}: every rank would train on its own positions alone",
            hint="add a data-parallel plugin: composer3d plugins shows which plugin averages over which axis",
        )
        for name in context.layout.names(Role.SEQUENCE)
        if context.degrees[name] > 1 and name not in averaged
    ]


def _device_problems(registered: Registered, context: RunContext) -> list[Problem]:
    devices = registered.info.devices
    if devices is None or context.device.type in devices:
        return []
    message = f"{registered.name} works on {' and '.join(devices)}, and this run is on {context.device.type}"
    path = (registered.info.family, registered.name)
    return [context.manifest.document.problem(path, message, whole_table=True)]


def _select(preparation: Preparation) -> None:
    """Let every transform choose its modules on the whole model."""
    context, problems = preparation.context, preparation.problems
    collected: list[tuple[Registered, Transform]] = []
    for registered, function in preparation.hooks.transforms():
        with asking(problems, registered, context):
            answer = function(context=context)
            for transform in answer if isinstance(answer, list | tuple) else (answer,):
                if transform is not None:
                    collected.append((registered, _blaming(registered, transform)))
    by_name = preparation.declared_by
    by_name |= {transform.name: registered for registered, transform in collected}
    try:
        alone = context.purpose == "verify" and context.world_size == 1
        ordered = resolve((transform for _, transform in collected), alone=alone)
    except ComposerError as error:
        problems.append(at_plugin(named_in(str(error), collected), context, error))
        return
    for transform in ordered:
        registered = by_name[transform.name]
        with asking(problems, registered, context):
            before = _structure(preparation.model)
            fqns = tuple(transform.select(preparation.model, context) or ())
            if _structure(preparation.model) != before:
                raise TransformError(
                    f"{transform.name} changes the model in select, which only chooses; do so in apply"
                )
            if transform.may_be_empty and not fqns:
                continue
            _check_selection(transform, fqns, context)
            if transform.own_units:
                context.own_units += fqns
            if transform.rows is not None:
                transform.rows(context)
            preparation.selected.append((transform, fqns))


def _structure(model: nn.Module) -> list[tuple[str, int]]:
    return [(fqn, id(module)) for fqn, module in model.named_modules()]


def _check_selection(transform: Transform, fqns: tuple[str, ...], context: RunContext) -> None:
    idle = [fqn for fqn in fqns if fqn in context.uncalled]
    if idle and transform.phase in (Phase.RECOMPUTE, Phase.COMPILE):
        raise TransformError(
            f'{transform.name} selected "{idle[0]}", which has no forward, so it would do nothing; name modules that '
            'are called, for example [model] blocks = "blocks.*.*"'
        )
    if not fqns:
        raise TransformError(f"{transform.name} selects no module, so it would do nothing")
    known = {*context.fqns, *context.parameter_fqns}
    axes = {axis.name for axis in context.layout.axes}
    strange = [axis for axis in (*transform.uses, *transform.averages) if axis not in axes]
    if strange:
        raise TransformError(f'{transform.name} uses the axis "{strange[0]}", which is no axis of the mesh')
    apart = [axis for axis in (*transform.uses, *transform.averages) if axis in context.layout.names(Role.INDEPENDENT)]
    if apart and transform.phase in (Phase.SPLIT, Phase.TENSOR, Phase.DATA):
        raise TransformError(
            f'{transform.name} shards parameters, or averages gradients, over "{apart[0]}", along which ranks train '
            "models of their own: there is no model there that they could hold together"
        )
    foreign = [fqn for fqn in fqns if fqn not in known]
    if foreign:
        raise TransformError(f'{transform.name} selects "{foreign[0]}", which the model does not have')


def _blaming(registered: Registered, transform: Transform) -> Transform:
    """Return a transform whose functions raise errors that name the plugin."""
    of = f'of the transform "{transform.name}"'
    select = blamed_listing(registered, f"select {of}", transform.select)
    apply = blamed_listing(registered, f"apply {of}", transform.apply)
    rows, returns = transform.rows, Mapping[str, Sequence[str]]
    if rows is not None:
        rows = blamed(registered, f"rows {of}", rows, returns=returns)
    return replace(transform, select=select, apply=apply, rows=rows)
