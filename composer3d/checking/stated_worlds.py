"""Problems of every world size that a manifest states, before a run of any of them is started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from composer3d.checking.check import inspect
from composer3d.checking.rules import batch_problems
from composer3d.errors import ComposerError, ManifestError, Problem
from composer3d.mesh import Role

if TYPE_CHECKING:
    import torch

    from composer3d.hooks import Hooks
    from composer3d.manifest import InspectedManifest, Manifest

__all__ = ["world_size_problems"]


def world_size_problems(
    inspected: InspectedManifest, *, world_size: int | None, device: torch.device, known: Iterable[Problem] = ()
) -> list[Problem]:
    """Check the layout and the batches on every world size that the manifest states.

    The smallest world, the largest, and those with an entry in `[mesh] layouts` are joined with the model too.

    Args:
        inspected: A manifest and its problems so far, from `open_manifest`.
        world_size: The ranks that are there, which an inspection has been made for; None where only the manifest is.
        device: Where the run would put parameters.
        known: Problems found so far.
    """
    from composer3d.hooks import Hooks
    from composer3d.runner import world_sizes

    manifest = inspected.manifest
    sizes = world_sizes(manifest)
    if not sizes or any(name not in manifest.tables for name in ("train", "data", "model")):
        return []
    found = _rules(manifest, sizes, world_size)
    told = {problem.message for problem in known}
    try:
        hooks = Hooks(manifest.plugins)
    except ComposerError:  # reported by the inspection of the world that is there
        return found
    for size in sizes:
        if size == world_size:
            continue
        if size in (sizes[0], sizes[-1]) or str(size) in manifest.mesh.layouts:
            of_size = inspect(inspected, world_size=size, rank=0, device=device).problems
        else:
            of_size = _layout_alone(manifest, hooks, size)
        new = [problem for problem in of_size if problem.severity == "error" and problem.message not in told]
        told.update(problem.message for problem in new)
        found += [replace(problem, message=f"on {size} ranks: {problem.message}") for problem in new]
    return found


def _rules(manifest: Manifest, sizes: tuple[int, ...], world_size: int | None) -> list[Problem]:
    """Return what is wrong with the statement of the sizes itself."""
    has_nodes = getattr(manifest.tables.get("run"), "nodes", None) is not None
    key, found = ("run", "nodes") if has_nodes else ("mesh", "layouts"), []
    if world_size is not None and world_size not in sizes:
        per_node = manifest.mesh.gpus_per_node or 1
        shown = ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
        of = f" ({per_node} a node)" if has_nodes else ""
        message = f"the world has {world_size} ranks, and a run of this manifest has {shown}{of}"
        found.append(manifest.document.problem(key, message, hint="start as many, or state this number too"))
    if len(sizes) == 1:
        return found
    if manifest.train.global_batch is None:
        message = (
            "the run may have several world sizes, and global_batch is not stated: it would be microbatch x the "
            "data-parallel degree, another one on each"
        )
        found.append(manifest.document.problem(("train",), message, hint="state train.global_batch", whole_table=True))
    replicas = [axis.name for plugin in manifest.plugins for axis in plugin.info.axes if axis.role is Role.REPLICA]
    several = next((name for name in replicas if (manifest.degrees.get(name) or 1) > 1), None)
    if several is not None:
        message = f"several world sizes beside {several} = {manifest.degrees[several]}: groups have one size"
        hint = f"leave them out: groups of {several} come and go by themselves"
        found.append(manifest.document.problem(key, message, hint=hint))
    return found


def _layout_alone(manifest: Manifest, hooks: Hooks, size: int) -> list[Problem]:
    from composer3d.composition import layout_of

    try:
        return batch_problems(manifest, layout_of(manifest, hooks, world_size=size))
    except ManifestError as error:
        return list(error.problems)
