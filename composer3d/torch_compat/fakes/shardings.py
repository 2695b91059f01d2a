"""Shardings of operators' results on DTensors, found once for all meshes of one form."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

__all__ = ["like_other_meshes"]

_FIND = "propagate_op_sharding_non_cached"


@contextlib.contextmanager
def like_other_meshes(known: dict[Any, Any]) -> Iterator[None]:
    """Let DTensor find the shardings of results, inside, as it has for equal operands on a mesh of the same form.

    torch keeps what it found by mesh, and ranks of other stages, and other layouts, have meshes of other ranks, for
    which it takes milliseconds an operator to find the same. The method is private (torch 2.11-2.15).

    Args:
        known: What was found so far; it is added to. It knows shapes, and no ranks.
    """
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    find, own = propagator.propagate_op_sharding_non_cached, vars(propagator).get(_FIND)

    def found(op_schema: Any) -> Any:
        key, mesh = _form_of(op_schema)
        if key is None:
            return find(op_schema)
        if key not in known:
            result = find(op_schema)
            # Where operands are redistributed, or a rank is given arguments of its own, it is found anew.
            is_own = result.needs_redistribute or result.redistribute_schema is not None
            known[key] = None if is_own else (type(result), _on_mesh(result.output_spec, None))
            return result
        before = known[key]
        return find(op_schema) if before is None else before[0](_on_mesh(before[1], mesh))

    propagator.propagate_op_sharding_non_cached = found
    try:
        yield
    finally:
        if own is None:
            del propagator.propagate_op_sharding_non_cached
        else:
            propagator.propagate_op_sharding_non_cached = own


def _form_of(op_schema: Any) -> tuple[Any, Any]:
    """Return what operands of operators have in common whose results are sharded alike, and their mesh.

    None where they have several meshes, or are of a kind that has no hash.
    """
    import torch
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    meshes: list[Any] = []

    def form(value: Any) -> Any:
        if isinstance(value, DTensorSpec):
            if not any(value.mesh is mesh for mesh in meshes):
                meshes.append(value.mesh)
            flag = getattr(value, "use_strided_shard_as_shard_order", None)
            return value.placements, value.tensor_meta, getattr(value, "shard_order", None), flag
        if isinstance(value, list | tuple):
            return type(value), tuple(map(form, value))
        return type(value), value

    key: tuple[Any, ...] = op_schema.op, form(op_schema.args_schema), form(tuple(op_schema.kwargs_schema.items()))
    if len(meshes) != 1:
        return None, None
    mesh = meshes[0]
    place = None if mesh.get_coordinate() is None else tuple(mesh.get_coordinate())
    try:
        key = *key, torch.get_default_dtype(), tuple(mesh.shape), mesh.mesh_dim_names, mesh.device_type, place
        hash(key)
    except TypeError:
        return None, None
    return key, mesh


def _on_mesh(specs: Any, mesh: Any) -> Any:
    """Return the specs of an operator's results on another mesh."""
    if specs is None:
        return None
    if isinstance(specs, list | tuple):
        return type(specs)([_on_mesh(each, mesh) for each in specs])
    other = copy.copy(specs)
    other.mesh = mesh
    return other
