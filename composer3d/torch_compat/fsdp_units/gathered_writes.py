"""Writes of a loop, or of a forward, into parameters that a unit of FSDP2 has gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer3d.torch_compat.layouts import fsdp_groups

__all__ = ["shards_of_gathered", "versions_of", "write_back"]


def versions_of(group: Any) -> dict[Any, tuple[int, int]]:
    """Return what changes when a gathered parameter is written, or is given other memory, by FSDP2's record of it.

    Writes through `.data` of plain tensors are not counted by torch, and not seen. The records are private (torch
    2.11-2.15).

    Args:
        group: Whose parameters have just been gathered, or are about to be freed.
    """
    import torch

    plain, found = (torch.Tensor, torch.nn.Parameter), {}
    for record in group.fsdp_params:  # of every unit, twice in a step and more
        full = getattr(record, "_unsharded_param", None)
        if full is not None and type(local := _local(full)) in plain and not full.is_inference():
            found[record] = full._version, local.data_ptr()
    return found


def shards_of_gathered(module: Any) -> dict[int, Any]:
    """Return the sharded parameter of every one that FSDP2 has gathered, by the `id` of what is registered for it now.

    Its records of them are private (torch 2.11-2.15).

    Args:
        module: With units in it.
    """
    groups = [group for each in module.modules() for group, *_ in fsdp_groups(each) if group.is_unsharded]
    records = (p for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param"))
    return {id(p._unsharded_param): p.sharded_param for p in records}


def write_back(group: Any, known: dict[Any, tuple[int, int]], written: Callable[[str, Any, Any], None]) -> None:
    """Copy what was written into gathered parameters to their shards, before what was gathered is freed.

    Args:
        group: Of FSDP2.
        known: From `versions_of`, when they had been gathered.
        written: Called with FQN, sharded parameter and local whole tensor of each; may raise.

    Memory and collectives: none.
    """
    import torch

    for record, found in versions_of(group).items():
        if record not in known or known[record] == found:
            continue
        full = record._unsharded_param
        whole = _local(full).detach()
        if found[1] != known[record][1]:  # the next gather writes into FSDP2's memory, and the parameter is to have it
            size, stride = record._orig_size, record._contiguous_orig_stride
            memory = torch.as_strided(record.all_gather_outputs[0], size, stride, 0)
            if full is _local(full):
                full.data = memory
            else:
                full._local_tensor = memory
        written(record._param_fqn, record.sharded_param, whole)
        info, dim = group.mesh_info, record.fsdp_placement.dim
        index, num = getattr(info, "shard_mesh_rank", 0), getattr(info, "shard_mesh_size", 1)
        pieces = torch.chunk(whole, num, dim=dim)
        if index < len(pieces):
            record.sharded_param._local_tensor.copy_(pieces[index])


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)
