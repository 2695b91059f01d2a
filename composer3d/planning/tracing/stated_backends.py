"""Backends of process groups that plugins state for axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.mesh import Role

if TYPE_CHECKING:
    from composer3d.composition import Preparation

__all__ = ["stated_backends"]


def stated_backends(preparation: Preparation) -> dict[str, str]:
    """Return the backends of the axes whose groups a plugin gives options, on the run's device.

    Where options state none, or one of another device alone, it is the device's own: gloo's of a CPU, NCCL's of others.

    Args:
        preparation: Of a plan; its run's device need not be there.
    """
    context = preparation.context
    device = context.run_device.type
    found = {}
    for axis in context.layout.axes:
        if context.degrees.get(axis.name, 1) == 1 or axis.role is Role.REPLICA:
            continue  # without a group in which anything is sent
        options = preparation.hooks.group_options(context, axis.name)
        if options is not None:
            stated = [part.rpartition(":") for part in (options.backend or "").lower().split(",")]
            parts = {kind: backend for kind, _, backend in stated if backend}
            found[axis.name] = parts.get(device) or parts.get("") or ("gloo" if device == "cpu" else "nccl")
    return found
