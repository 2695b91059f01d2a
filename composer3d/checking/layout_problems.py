"""Refusals that are known of composed parameters only, found by a composition of fake tensors, for `check`."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError, ForkError, HookError, Problem, TransformError
from composer3d.mesh import Role

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.manifest import Manifest

__all__ = ["layout_problems"]


# What composing asks plugins once the parts have their memory.
_ASKED_LAST = ("composer3d_grad_scaler", "composer3d_recorder", "composer3d_step_actions", "composer3d_state")


def layout_problems(manifest: Manifest, preparation: Preparation) -> list[Problem]:
    """Return what only a composition shows: state of parameters that the layout cannot keep, and hooks that raise.

    In a forked child for each stage of the pipeline, which composes as one of its ranks in a fake process group, with
    fake tensors. Nothing is composed where no state is attached to parameters (lists, closures, classes) and no table
    names a plugin's class.

    Args:
        manifest: Typed, and without a problem so far.
        preparation: Of its model.
    """
    from composer3d.processes import Child, ChildError, refuse_open_group

    try:
        refuse_open_group()
    except ForkError:
        return []  # no other group can be made in this process
    document = manifest.document
    foreign = {
        registered.name
        for registered in preparation.hooks.plugins
        if document.get((registered.info.family, registered.name, "use")) is not None
    }
    if not preparation.attachments.depend_on_layout and not foreign:
        return []
    layout = preparation.context.layout
    stages = {axis.name for axis in layout.axes if axis.role is Role.STAGE}
    ranks: dict[tuple[int, ...], int] = {}
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        ranks.setdefault(tuple(coordinates[name] for name in stages), rank)
    for rank in ranks.values():
        try:
            raised = Child(partial(_compose, preparation, rank, foreign)).result()
        except (ForkError, ChildError):
            continue  # the run tells what it meets itself
        except ComposerError as error:
            return [document.problem(("model", "use"), str(error))]
        if raised:
            return [document.problem(tuple(raised["path"]), raised["message"], whole_table=True)]
    return []


def _compose(preparation: Preparation, rank: int, foreign: Set[str]) -> Mapping[str, Any]:
    """Compose as one rank; the process ends with what that leaves behind.

    Returns:
        The table and the message of what a plugin raised by itself, empty without such.
    """
    from composer3d import torch_compat
    from composer3d.composition import apply_transforms, build_mesh, give_memory
    from composer3d.processes import fake_world

    context = preparation.context
    with fake_world(context.world_size, rank), context.as_rank(rank):
        try:
            build_mesh(preparation)
            apply_transforms(preparation)
            with torch_compat.fake_tensors():
                give_memory(preparation)
                _ask_last(preparation, foreign)
        except TransformError as error:
            if error.path is None:
                raise
            return {"path": error.path, "message": error.message}
        except HookError as error:
            # What torch raised may be of what is not here: values, and other ranks.
            return {"path": error.path, "message": error.message} if error.is_own else {}
    return {}


def _ask_last(preparation: Preparation, foreign: Set[str]) -> None:
    """Call the hooks that composing calls at its end; a refusal of something that is not here is none of the run's."""
    context = preparation.context
    arguments = {"parts": context.parts, "loss_fn": lambda output, target: output.sum()}
    for hook, more in {**dict.fromkeys(_ASKED_LAST, {}), "composer3d_schedule": arguments}.items():
        for registered, function in preparation.hooks.asked(hook):
            if registered.name not in foreign:
                continue
            try:
                function(context=context, **more)
            except HookError:
                raise
            except ComposerError:
                continue
