"""Meshes of the runs that are open, which tell a run's DTensors from others of the process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.observation.lost_peers import lost_a_peer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from composer3d.context import RunContext

__all__ = ["forget_meshes", "know_meshes", "owners_of", "owns", "raise_explained", "sharded_parameters"]

_MESHES: weakref.WeakKeyDictionary[RunContext, frozenset[DeviceMesh]] = weakref.WeakKeyDictionary()
_PARAMETERS: weakref.WeakKeyDictionary[RunContext, Mapping[str, DTensor]] = weakref.WeakKeyDictionary()
# Meshes that an open run has, or that equal one of them: two are compared rank by rank, which takes a millisecond for
# 16,384 of them, and every operator asks.
_FOUND: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


def know_meshes(context: RunContext) -> None:
    """Take DTensors over a run's meshes for the run's, until `forget_meshes`.

    A mesh that equals one of them, in ranks, shape and names of dims, cannot be told from it: torch itself gives a
    DTensor the one or the other, whichever it met first.
    """
    from torch.distributed.tensor import DTensor

    parameters = {fqn: p for fqn, p in context.named_parameters() if isinstance(p, DTensor)}
    _PARAMETERS[context] = parameters
    found = {context.mesh, *(p.device_mesh for p in parameters.values())}
    _MESHES[context] = frozenset({*found, *(mesh[name] for mesh in found for name in mesh.mesh_dim_names or ())})
    weakref.finalize(context, _FOUND.clear).atexit = False  # of a run that nobody closed


def forget_meshes(context: RunContext) -> None:
    """Leave DTensors of a run that was closed to torch; without an open run, all operators."""
    _MESHES.pop(context, None)
    _FOUND.clear()
    _PARAMETERS.pop(context, None)
    if not _MESHES:
        torch_compat.leave_operators()
        torch_compat.leave_data()


def owners_of(mesh: DeviceMesh) -> Iterator[RunContext]:
    """Yield the open runs that have a mesh."""
    for context, meshes in tuple(_MESHES.items()):
        if mesh in meshes:
            yield context


def raise_explained(error: RuntimeError, activity: str) -> None:
    """Raise what every rank did, where a peer was lost or late in a loop's operator on shards; else return.

    Args:
        error: Of the operator.
        activity: What this rank was in.
    """
    for context in tuple(_MESHES) if lost_a_peer(error) else ():
        if context.flight is not None:
            with context.flight.explaining(activity):
                raise error


def sharded_parameters(context: RunContext) -> Mapping[str, DTensor]:
    """Return an open run's sharded parameters, also while the model has them gathered."""
    return _PARAMETERS.get(context, {})


def owns(args: Any) -> bool:
    """Return whether any DTensor, or mesh, among an operator's arguments and in lists of them is an open run's."""
    tensors, meshes = _kinds()
    for arg in args:
        if isinstance(arg, tensors):
            mesh = arg.device_mesh
        elif isinstance(arg, list | tuple):
            if owns(arg):
                return True
            continue
        elif isinstance(arg, meshes):
            mesh = arg
        else:
            continue
        if _FOUND.get(id(mesh)) is mesh or _is_of_run(mesh):
            return True
    return False


def _is_of_run(mesh: DeviceMesh) -> bool:
    if not any(mesh in meshes for meshes in _MESHES.values()):
        return False
    _FOUND[id(mesh)] = mesh
    return True


@functools.cache
def _kinds() -> tuple[Any, Any]:
    """Return the classes of DTensors and of meshes: every operator asks for them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    return DTensor, DeviceMesh
