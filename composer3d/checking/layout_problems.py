"""Refusals that are known of composed parameters only, found by composing without values, for `check`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError, ForkError, Problem
from composer3d.mesh import Role

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.manifest import Manifest

__all__ = ["layout_problems"]


def layout_problems(manifest: Manifest, preparation: Preparation) -> list[Problem]:
    """Return the state attached to parameters (lists, closures, classes) that the layout cannot keep.

    In a forked child for each stage of the pipeline, which composes as one of its ranks in a world without others, on
    fake tensors. Nothing is composed where no state is attached to parameters.

    Args:
        manifest: Typed, and without a problem so far.
        preparation: Of its model.
    """
    from composer3d.processes import Child, ChildError

    if not preparation.attachments.depend_on_layout:
        return []
    layout = preparation.context.layout
    stages = {axis.name for axis in layout.axes if axis.role is Role.STAGE}
    ranks: dict[tuple[int, ...], int] = {}
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        ranks.setdefault(tuple(coordinates[name] for name in stages), rank)
    for rank in ranks.values():
        try:
            Child(partial(_compose, preparation, rank)).result()
        except (ForkError, ChildError):
            continue  # the run tells what it meets itself
        except ComposerError as error:
            return [manifest.document.problem(("model", "use"), str(error))]
    return []


def _compose(preparation: Preparation, rank: int) -> Mapping[str, Any]:
    """Compose as one rank; the process ends with what that leaves behind."""
    from composer3d import torch_compat
    from composer3d.composition import apply_transforms, build_mesh, give_memory
    from composer3d.processes import fake_world

    with fake_world(preparation.context.world_size, rank), preparation.context.as_rank(rank):
        build_mesh(preparation)
        apply_transforms(preparation)
        with torch_compat.fake_tensors():
            give_memory(preparation)
    return {}
