"""The ranks that this machine is to start, and whether it can."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from composer3d.errors import ComposerError, ManifestError, Problem
from composer3d.runner.launching.node_counts import world_sizes

if TYPE_CHECKING:
    import torch

    from composer3d.manifest import Manifest

__all__ = ["machine_problems", "num_local_ranks"]

# What a mistyped degree would fork: each rank takes tens of MiB before its first step.
_LEAST_RANKS, _RANKS_PER_CORE = 64, 16


def num_local_ranks(manifest: Manifest, device: torch.device, *, num_nodes: int = 1) -> int | None:
    """Return how many ranks this machine, or several alike, are to have; None where degrees are wrong in themselves.

    The degrees that the manifest states multiply to it. An open one, -1 or the data-parallel plugin's own axis, takes
    what is left of the machines' GPUs, and is 1 on a CPU. Of several world sizes it is the largest that fits.

    Args:
        manifest: Typed, as far as it can be.
        device: Where the run computes.
        num_nodes: Machines.
    """
    import torch

    from composer3d.composition import layout_of
    from composer3d.hooks import Hooks

    if "mesh" not in manifest.tables:
        return None
    sizes = world_sizes(manifest)
    if sizes:
        most = _most_ranks() if device.type == "cpu" else torch.accelerator.device_count()
        return max((size for size in sizes if size <= most * num_nodes), default=sizes[0])
    try:
        hooks = Hooks(manifest.plugins)
        stated = layout_of(manifest, hooks, world_size=None).num_ranks
    except ComposerError:  # the inspection reports it
        return None
    if device.type == "cpu":
        return stated
    try:
        available = torch.accelerator.device_count() * num_nodes // stated * stated
        return layout_of(manifest, hooks, world_size=available).num_ranks if available else stated
    except ManifestError:  # no degree is open
        return stated


def machine_problems(manifest: Manifest, device: torch.device, num_ranks: int) -> list[Problem]:
    """Compare the manifest's requirements with this machine.

    Args:
        manifest: Of the run.
        device: Where it computes.
        num_ranks: Ranks that are to be started here.
    """
    import torch

    if device.type == "cpu":
        most = _most_ranks()
        if num_ranks <= most:
            return []
        cores = os.cpu_count() or 1
        message = f"{num_ranks} ranks are more than the {most} that this machine with {cores} cores is given at once"
        hint = "start them on several machines with torchrun, or lower the degrees"
        return [manifest.document.problem(("mesh",), message, hint=hint, whole_table=True)]
    available = torch.accelerator.device_count()
    if available == 0:
        message = f'device = "{device.type}", and this machine has none'
        return [manifest.document.problem(("run", "device"), message)]
    if num_ranks > available:
        message = f"{num_ranks} ranks need as many GPUs, and this machine has {available}"
        hint = "start them on several machines with torchrun, or lower the degrees"
        return [manifest.document.problem(("mesh",), message, hint=hint, whole_table=True)]
    return []


def _most_ranks() -> int:
    return max(_LEAST_RANKS, _RANKS_PER_CORE * (os.cpu_count() or 1))
