"""Tensors assigned to `.data` of DTensors, which torch ignores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer3d.torch_compat.layouts import fsdp_groups

__all__ = ["UnitShard", "assign_data", "leave_data", "take_local", "unit_shards"]


def assign_data(assign: Callable[[Any, Any], bool], read: Callable[[Any, Any], None] = lambda *_: None) -> None:
    """Call a function for each `tensor.data = value` of a DTensor, and one for each `tensor.data`, until `leave_data`.

    Torch gives the wrapper the value's metadata, and leaves the local tensor, which has the values, as it is (torch
    2.11-2.15). Attributes of tensors are properties of their class, so the class gets one of its own.

    Args:
        assign: Given tensor and value; returns whether it has assigned it, else torch does what it does.
        read: Given the tensor and what is returned.
    """
    import torch
    from torch.distributed.tensor import DTensor

    inherited: Any = torch.Tensor.data

    def assigned(tensor: Any, value: Any) -> None:
        if not assign(tensor, value):
            inherited.__set__(tensor, value)

    def told(tensor: Any) -> Any:
        alias = inherited.__get__(tensor)
        read(tensor, alias)
        return alias

    DTensor.data = property(told, assigned)  # type: ignore[assignment]


def leave_data() -> None:
    """Leave `.data` of DTensors to torch again."""
    from torch.distributed.tensor import DTensor

    if "data" in vars(DTensor):
        del DTensor.data


def unit_shards(module: Any) -> dict[int, UnitShard]:
    """Return FSDP2's records of the sharded parameters of a model's units, by the identity of the parameter."""
    pairs = ((group, p) for child in module.modules() for group, _, _ in fsdp_groups(child) for p in group.fsdp_params)
    return {id(p.sharded_param): UnitShard(group=group, record=p) for group, p in pairs}


@dataclass(frozen=True, kw_only=True)
class UnitShard:
    """FSDP2's record of a sharded parameter; all of it is private (torch 2.11-2.15).

    Args:
        group: Of the parameters that are gathered with it.
        record: Of the parameter.
    """

    group: Any
    record: Any

    @property
    def parameter(self) -> Any:
        """The parameter, sharded."""
        return self.record.sharded_param

    @property
    def is_gathered(self) -> bool:
        """Whether the next forward would compute with what was gathered before."""
        return bool(self.group.is_unsharded)


def take_local(tensor: Any, value: Any, shard: UnitShard | None = None) -> None:
    """Let a DTensor have the local tensor of another one of its placements, as `.data` of a plain one has its memory.

    What was made of the tensor before, by `.data` or `detach()`, keeps the old one. The value shares memory with the
    tensor from then on.

    Args:
        tensor: Parameter, or any other.
        value: Of the same shape, dtype, mesh and placements.
        shard: Record of the parameter, which follows; None where no unit has it.

    Memory: for a shard that FSDP2 pads, and that was not padded, a new one.
    """
    local = value._local_tensor.detach()
    if shard is not None:
        value._local_tensor = local = _as_unit_shard(shard.record, local)
    tensor._local_tensor = local


def _as_unit_shard(parameter: Any, local: Any) -> Any:
    """Let FSDP2 gather a shard from another tensor; returns that without its padding."""
    import torch

    size = parameter.padded_sharded_param_size
    local = local.contiguous()
    is_padded = local.storage_offset() == 0 and local.untyped_storage().nbytes() == size.numel() * local.itemsize
    if is_padded and local.numel():
        padded = local.as_strided(size, torch.empty(size, device="meta").stride())
    else:
        padded = local.new_zeros(size)
        if local.numel():
            padded.narrow(parameter.fsdp_placement.dim, 0, local.shape[parameter.fsdp_placement.dim]).copy_(local)
    if parameter.pin_memory and not padded.is_pinned():
        padded = padded.cpu().pin_memory()
    parameter._sharded_param_data = padded.view(-1)
    dim = parameter.fsdp_placement.dim
    shard = padded.narrow(dim, 0, local.shape[dim] if local.numel() else 0)
    return shard if shard.shape == local.shape else shard.reshape(local.shape)
