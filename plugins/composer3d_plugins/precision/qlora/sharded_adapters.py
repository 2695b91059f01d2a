"""Placements of adapters and stored weights of linear layers that tp has sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer3d import TransformError
from composer3d_plugins.precision.qlora.nf4 import Format

if TYPE_CHECKING:
    from torch import nn

__all__ = ["in_bytes", "shard_adapters", "stored_like"]


def shard_adapters(module: Any) -> None:
    """Shard a layer's adapters over tp like its weight; a matrix without the sharded dim stays replicated."""
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard

    weight = module.weight
    if not isinstance(weight, DTensor) or getattr(module, "lora_a", None) is None:
        return
    (placement,), mesh = weight.placements, weight.device_mesh
    for name, dim in (("lora_a", 1), ("lora_b", 0)):
        full = getattr(module, name).detach()
        is_sharded = placement.is_shard(1 - dim if module.adapter.is_transposed else dim)
        piece = full.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone() if is_sharded else full
        value = DTensor.from_local(
            piece,
            mesh,
            [Shard(dim) if is_sharded else Replicate()],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        setattr(module, name, nn.Parameter(value))


def stored_like(weight: Any, form: Format) -> nn.Parameter:
    """Return an empty stored weight with the weight's placements; on meta if the weight is."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor

    rows, columns = weight.shape
    shape = torch.Size((rows, form.width(columns)))
    if not isinstance(weight, DTensor):
        return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=weight.device), requires_grad=False)
    (placement,), mesh = weight.placements, weight.device_mesh
    local_rows, local_columns = weight.to_local().shape
    if local_columns % form.piece:
        raise TransformError(
            f"a plugin sharded a quantised weight into {local_columns} columns per rank, which no plan has declared"
        )
    piece = torch.empty((local_rows, form.width(local_columns)), dtype=torch.uint8, device=weight.device)
    value = DTensor.from_local(piece, mesh, [placement], run_check=False, shape=shape, stride=(shape[1], 1))
    return nn.Parameter(value, requires_grad=False)


def in_bytes(runs: Sequence[tuple[int, int]], form: Format) -> list[tuple[int, int]]:
    """Return runs of columns as runs of bytes."""
    size, num_bytes = form.piece, form.piece_bytes
    assert not any(start % size or length % size for start, length in runs), "pieces are fitted to runs"
    return [(start // size * num_bytes, length // size * num_bytes) for start, length in runs]
