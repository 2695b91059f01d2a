"""Full tensors: shards of a mesh gathered, partial sums added up, and tensors of other stages received."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from composer3d.processes.json_exchange import all_gather_json

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["full", "gather_full"]


def full(tensor: Tensor) -> Tensor:
    """Return the full value of a tensor, detached: a DTensor's shards gathered and its partial sums summed.

    Memory: the full tensor. Collectives: one or more for each sharded or partial axis of a DTensor, so every rank of
    its mesh calls this; none for a plain tensor.
    """
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def gather_full(named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the full value of every named tensor of the model, on every rank, sorted by name.

    Ranks may hold different names, as the stages of a pipeline do: what a rank lacks comes from the lowest rank that
    has it. Every rank of the world calls this.

    Args:
        named_tensors: FQN and tensor, for example `model.named_parameters()`.

    Memory: copies of all full tensors. Collectives: those of `full`, one gather of names, and one broadcast for each
    name that not every rank has.
    """
    import torch
    import torch.distributed as dist

    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    own = {fqn: full(tensor).clone() for fqn, tensor in items}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(sorted(own.items()))
    held = all_gather_json({fqn: _described(tensor) for fqn, tensor in own.items()})
    for fqn in sorted({fqn for names in held for fqn in names}):
        owners = [rank for rank, names in enumerate(held) if fqn in names]
        if len(owners) == len(held):
            continue
        shape, dtype, device = held[owners[0]][fqn]
        tensor = own[fqn] if fqn in own else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        # A rank that has the tensor keeps its own: a difference between owners stays visible.
        received = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(received, src=owners[0])
        own.setdefault(fqn, received)
    return dict(sorted(own.items()))


def _described(tensor: Tensor) -> tuple[list[int], str, str]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device.type
