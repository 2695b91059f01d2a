"""Application of a prepared plan to the model: stages, transforms in their order, values for tensors on meta."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from composer3d import initialisation, torch_compat
from composer3d.composition.composed_model.unsuitable_models import mark_composed
from composer3d.errors import InitialisationError, TransformError
from composer3d.initialisation import Slab
from composer3d.initialisation.parameter_order import StoredOrders
from composer3d.interfaces import Part
from composer3d.mesh import Role
from composer3d.processes.json_exchange import all_gather_json
from composer3d.step import gradients, guard
from composer3d.transform import Phase, StepAction, StepPoint, Transform

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.composition.preparing import Preparation
    from composer3d.context import RunContext
    from composer3d.initialisation import Attachments, Recipe

__all__ = ["agree_on_factory", "agree_on_weights", "apply_transforms", "give_memory", "gradient_hooks", "materialise"]


def apply_transforms(
    preparation: Preparation, *, after_split: Callable[[Sequence[Part]], None] = lambda parts: None
) -> None:
    """Split the model and apply every transform up to COMMUNICATE, checking that each did what it declared.

    Args:
        preparation: With a mesh.
        after_split: Called with this rank's stages, before anything else is done to them.
    """
    context, model = preparation.context, preparation.model
    context.split = preparation.hooks.split(context, model)
    context.parts = (Part(module=model),) if context.split is None else _shared_over(context.split.parts, model)
    after_split(context.parts)
    if context.split is None and any(transform.phase is not Phase.SPLIT for transform, _ in preparation.selected):
        mark_composed(model)  # stages are copies; without them the transforms change the module that compose was given
    for transform, fqns in preparation.selected:
        if transform.phase is not Phase.MATERIALISE:
            _apply(transform, fqns, preparation)
    unheard = [
        str(registered)
        for registered in preparation.hooks.implementing("composer3d_dtypes")
        if not context.was_asked("composer3d_dtypes")
    ]
    if unheard:
        raise TransformError(f"{unheard[0]} gives dtypes, but no plugin of this manifest applies them")


def _shared_over(parts: Sequence[Part], model: nn.Module) -> tuple[Part, ...]:
    """Return stages that name, of modules that have several names, those that other stages hold and call too."""
    names: dict[int, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(fqn)
    several = [group for group in names.values() if len(group) > 1]
    found = []
    for part in parts:
        held = {fqn for fqn, _ in part.module.named_modules(remove_duplicate=False)} if several else set()
        firsts = {fqn: group[0] for group in several if set(group) - held for fqn in group if fqn in held}
        elsewhere = part.called_elsewhere.union(firsts)
        found.append(replace(part, called_elsewhere=elsewhere, firsts=firsts) if firsts else part)
    return tuple(found)


def _is_of_experts(fqn: str, context: RunContext) -> bool:
    """Return whether other ranks may hold a parameter instead of this one, along an axis of experts."""
    own = context.parameter_mesh(fqn)
    return own is not None and bool({*(own.mesh.mesh_dim_names or ())} & {*context.layout.names(Role.EXPERT)})


def _apply(transform: Transform, fqns: Sequence[str], preparation: Preparation) -> None:
    """Apply a transform; what it did otherwise than declared is told with its plugin's table."""
    try:
        _apply_checked(transform, fqns, preparation.context)
    except TransformError as error:
        by = preparation.declared_by.get(transform.name)
        if by is None or error.path is not None:
            raise
        raise TransformError(error.message, path=(by.info.family, by.name), place=by.place) from error


def _apply_checked(transform: Transform, fqns: Sequence[str], context: RunContext) -> None:
    trained = _num_trained(context)
    _apply_to_parts(transform, fqns, context)
    if trained and not _num_trained(context) and context.layout.degree(Role.STAGE) == 1:  # stages may have none
        raise TransformError(f"{transform.name} leaves no parameter to train: it froze all {trained} that were left")


def _num_trained(context: RunContext) -> int:
    return sum(parameter.requires_grad for part in context.parts for parameter in part.module.parameters())


def _apply_to_parts(transform: Transform, fqns: Sequence[str], context: RunContext) -> None:
    for part in context.parts:
        before = _names(part.module)
        have = before | {fqn for fqn, _ in part.module.named_modules()}
        present = [fqn for fqn in fqns if fqn in have]
        context.applied_part = part
        with torch_compat.forward_hooks.of_plugins(part.module):
            touched = set(transform.apply(part.module, present, context) or ())
        context.applied_part = None
        if missing := sorted(set(present) - touched):
            raise TransformError(f'{transform.name} selected {len(present)} modules and did not touch "{missing[0]}"')
        if foreign := sorted(touched - set(present)):
            raise TransformError(f'{transform.name} touched "{foreign[0]}", which it had not selected')
        initialisation.restore_ties(part.module, context.ties)
        now = _names(part.module)
        if lost := sorted(name for name in before - now if not _is_of_experts(name, context)):
            raise TransformError(f'{transform.name} renamed or dropped "{lost[0]}"; FQNs must stay')
        if transform.phase is not Phase.CONVERT and (more := sorted(now - before)):
            raise TransformError(f'{transform.name} added "{more[0]}"; only transforms in phase CONVERT add parameters')


def _names(module: nn.Module) -> set[str]:
    return {fqn for fqn, _ in module.named_parameters(remove_duplicate=False)}


def materialise(preparation: Preparation) -> None:
    """Materialise the weights of every part, then run the transforms that need them."""
    context, recipe = preparation.context, preparation.recipe

    has_loader = bool(preparation.hooks.implementing("composer3d_load_parameter"))
    held = {
        fqn: tensor.dtype
        for part in context.parts
        for fqn, tensor in [*part.module.named_parameters(remove_duplicate=False), *part.module.named_buffers()]
    }

    def load(fqn: str, tensor: Tensor | Slab) -> Tensor | Slab:
        if has_loader:
            tensor = tensor.read() if isinstance(tensor, Slab) else tensor  # plugins are given full tensors
            changed = preparation.hooks.load_parameter(context, fqn, tensor)
            if changed is not None and fqn in held and changed.dtype is not held[fqn]:
                raise InitialisationError(
                    f'composer3d_load_parameter returned "{fqn}" as {changed.dtype}, and the parameter is '
                    f"{held[fqn]}: rounding it on the way would be nobody's choice; return {held[fqn]}, or make the "
                    "parameter another one in a transform of phase CONVERT"
                )
            tensor = tensor if changed is None else changed
        return context.in_stored_order(fqn, tensor)

    unmade: list[Tensor] = []
    names: list[str] = []
    for part in context.parts:
        if recipe is not None:
            left = initialisation.materialise(
                part.module,
                recipe,
                seed=context.manifest.train.seed,
                device=context.device,
                load=load if has_loader or context.stash(StoredOrders).by_name else None,
            )
            tensors = dict([*part.module.named_parameters(), *part.module.named_buffers()])
            names += left
            unmade += [tensors[fqn] for fqn in left]
        elif context.device.type != "cpu":
            part.module.to(context.device)
    _finish(preparation)
    for fqn, tensor in zip(names, unmade, strict=True):
        if bool(gradients.local(tensor).isnan().any()):
            raise InitialisationError(f'"{fqn}" was added by a plugin, and nothing gave it values')


def give_memory(preparation: Preparation) -> None:
    """Allocate every part uninitialised, for a composition that computes nothing; then as `materialise`."""
    context, recipe = preparation.context, preparation.recipe
    for part in context.parts:
        initialisation.give_memory(part.module, recipe, device=context.device)
        initialisation.restore_ties(part.module, context.ties)
    _finish(preparation)


def _finish(preparation: Preparation) -> None:
    for transform, fqns in preparation.selected:
        if transform.phase is Phase.MATERIALISE:
            _apply(transform, fqns, preparation)
    _carry_over(preparation)


def _carry_over(preparation: Preparation) -> None:
    """Copy the model's attributes and hooks to this rank's parameters; if one stage refuses, all ranks do.

    Collectives: with several stages one all-reduce of one number.
    """
    import torch
    import torch.distributed as dist

    context, refusal = preparation.context, None
    try:
        preparation.attachments.carry_over(
            (part.module for part in context.parts),
            alone=context.world_size == 1,
            from_stored=context.in_model_order,
            to_stored=context.in_stored_order,
        )
    except TransformError as error:
        refusal = error
    if context.layout.degree(Role.STAGE) > 1:
        refused = torch.tensor(int(refusal is not None), device=guard.control_device(context.device))
        dist.all_reduce(refused, op=dist.ReduceOp.MAX)
        if refusal is None and torch_compat.active_fake_mode() is None and int(refused):
            refusal = TransformError("another stage's parameters were refused; its ranks say why")
    if refusal is not None:
        raise refusal


def gradient_hooks(attachments: Attachments) -> StepAction:
    """Return the step action that runs the model's own gradient hooks on reduced gradients.

    Collectives: all-gathers of the gradients of sharded parameters that have hooks.
    """
    return StepAction(
        name="model.gradient_hooks", point=StepPoint.GRADIENTS_REDUCED, run=lambda state: attachments.run_hooks()
    )


def agree_on_weights(model: nn.Module, context: RunContext, *, broadcast: bool) -> None:
    """Refuse ranks that start from different weights, or broadcast the first rank's."""
    import torch
    import torch.distributed as dist

    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    on_meta = next((fqn for fqn, tensor in tensors.items() if tensor.is_meta), None)
    if on_meta is not None:
        raise InitialisationError(f'"{on_meta}" is on meta and has no values; hand compose the factory, not its result')
    if context.world_size == 1:
        return
    if broadcast:
        control = guard.control_device(context.device)
        for tensor in tensors.values():
            full = tensor.data.to(control, memory_format=torch.contiguous_format)
            dist.broadcast(full, src=0)
            tensor.data.copy_(full)
        return
    difference = initialisation.first_difference(all_gather_json(initialisation.fingerprints(model)))
    if difference is not None:
        fqn, ranks = difference
        shown = " and ".join(f"rank {rank}" for rank in ranks[:4])
        raise InitialisationError(
            f'ranks start from different weights: "{fqn}" on {shown} is not what rank 0 has; '
            'seed all ranks alike, hand compose a factory, or pass weights="rank0"'
        )


def agree_on_factory(recipe: Recipe, context: RunContext) -> None:
    """Refuse ranks whose factories differ: their shards would be of different models."""
    if context.world_size == 1:
        return
    everyone = all_gather_json(recipe.fingerprint())
    other = next((rank for rank, digest in enumerate(everyone) if digest != everyone[0]), None)
    if other is not None:
        raise InitialisationError(
            f"the factory makes another model on rank {other} than on rank 0; it must not depend on the rank"
        )
