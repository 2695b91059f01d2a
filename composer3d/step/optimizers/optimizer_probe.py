"""Optimizers whose step of a sharded parameter differs from that of the whole parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError
from composer3d.step.optimizers.shard_step import steps_each_element
from composer3d.step.sharded_tensors.full_tensors import full

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

__all__ = ["probe_optimizer", "refused_of_shards"]

_NUM_STEPS = 2
# A norm of half of the elements is off by far more, roundings of another order of sums by far less.
_TOLERANCE = 0.05


def refused_of_shards(cls: type[torch.optim.Optimizer]) -> str:
    """Return why an optimizer of torch's steps no sharded parameters; empty where it does, or it is not torch's."""
    if cls.__module__.startswith("torch.optim") and cls.__name__ in ("Adafactor", "Rprop"):
        return (
            f"{cls.__name__} writes by indices, or raises sums over shards to a power in place, which DTensor, and so "
            "a sharded or replicated parameter, does not take; use adamw"
        )
    return ""


def probe_optimizer(
    cls: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], defaults: Mapping[str, Any]
) -> None:
    """Step a small parameter that is sharded as the first of some is, and compare with a whole one.

    An optimizer that works on `to_local()` gets the numbers of its shard, and nothing else says so.
    Torch's elementwise ones are not tried.

    Args:
        cls: Of the optimizer.
        parameters: Of this rank.
        defaults: Hyperparameters.

    Raises:
        StepError: It raises only on DTensors, or updates them differently.

    Memory: a few small tensors. Collectives: those of two steps of a parameter, and two all-gathers.
    """
    import torch
    from torch.distributed.tensor import DTensor

    if cls.__module__.startswith("composer3d.") or steps_each_element(cls):
        return
    first = next((p for p in parameters if isinstance(p, DTensor) and p.is_floating_point()), None)
    if first is None:
        return
    if reason := refused_of_shards(cls):
        raise StepError(reason)
    mesh, placement = _sharding(first)
    with torch.random.fork_rng([] if first.device.type == "cpu" else [first.device]):
        one, other = (_stepped(cls, defaults, value) for value in (_weights(mesh), _weights(mesh)))
    if one is None or other is None or not _agree(one, other):
        return  # it needs other parameters than these, or draws random numbers
    sharded = _on_shards(cls, defaults, mesh, placement)
    if not _agree(one, sharded):
        raise StepError(
            f"{cls.__name__} steps a sharded parameter otherwise than a whole one: what it computes of a parameter, as "
            "p.to_local().norm(), is of this rank's shard alone. Keep it a tensor: p.norm() of a "
            "DTensor sums over ranks, as torch.where(norm > 0, ...) and p.mul_(norm) then do; or take numbers of "
            "p.full_tensor()"
        )


def _sharding(parameter: Any) -> tuple[DeviceMesh, Placement]:
    """Return a mesh of one axis along which a parameter is sharded, or the mesh's last if it is replicated."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = parameter.device_mesh
    dims = [dim for dim, p in enumerate(parameter.placements) if not p.is_replicate() and mesh.size(dim) > 1]
    dim = dims[0] if dims else mesh.ndim - 1
    one = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dim]]
    return one, Shard(0) if dims else Replicate()


def _weights(mesh: DeviceMesh) -> Tensor:
    """Return a matrix whose rows grow, so that every shard has another norm; the same on all ranks."""
    import torch

    rows = torch.arange(1.0, 4 * mesh.size() + 1)
    return (rows.outer(torch.tensor([0.5, -1.0, 0.25, 2.0])) / rows[-1]).to(mesh.device_type)


def _stepped(cls: type[torch.optim.Optimizer], defaults: Mapping[str, Any], value: Tensor) -> Tensor | None:
    """Return how far two steps move a value; None where the class cannot step it."""
    try:
        return _steps(cls, defaults, value)
    except Exception:  # the real one reports it itself
        return None


def _steps(cls: type[torch.optim.Optimizer], defaults: Mapping[str, Any], value: Tensor) -> Tensor:
    from torch import nn

    parameter = nn.Parameter(value)
    before = full(parameter).clone()
    optimizer = cls([parameter], **copy.deepcopy(dict(defaults)))
    for number in range(_NUM_STEPS):
        parameter.grad = (value * (number + 1)).detach().clone() ** 3
        optimizer.step()
    return full(parameter) - before


def _on_shards(
    cls: type[torch.optim.Optimizer], defaults: Mapping[str, Any], mesh: DeviceMesh, placement: Placement
) -> Tensor:
    from torch.distributed.tensor import DTensor

    value = _weights(mesh)
    if placement.is_shard():
        value = value.chunk(mesh.size())[mesh.get_local_rank()].clone()
    try:
        return _steps(cls, defaults, DTensor.from_local(value, mesh, [placement], run_check=False))
    except Exception as error:  # any error of an operator on DTensors
        raise StepError(
            f"{cls.__name__} steps plain tensors and no DTensors, as sharded parameters are: "
            f"{type(error).__name__}: {error}"
        ) from error


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * one.abs().max())
