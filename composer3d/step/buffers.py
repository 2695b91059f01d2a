"""Buffers that training changes, averaged over ranks that read other samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.mesh import Role

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext

__all__ = ["average_buffers"]


def average_buffers(context: RunContext) -> None:
    """Replace every persistent floating-point buffer by its mean over the ranks that read other samples or positions.

    Batch-norm's running mean comes out as that of all ranks' samples; its running variance as the mean of the ranks'
    variances, which leaves out what their means differ by. (torch.nn.SyncBatchNorm has exact statistics, for two
    collectives a layer and step.) Buffers that are equal everywhere stay as they are to the last bit: the mean is taken
    in float64, where summing equal float32 numbers and dividing is exact. Evaluation and checkpoints are then the same
    on every rank, and training is not changed by it, as batch-norm trains with the batch's statistics.

    Memory: one float64 copy of the buffers. Collectives: one all-reduce an axis of degree above 1.
    """
    import torch
    import torch.distributed as dist

    axes = [name for name in context.layout.names(Role.BATCH, Role.SEQUENCE) if context.degrees[name] > 1]
    buffers = _changeable(context)
    if not axes or not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).to(torch.float64) for buffer in buffers])
    num_ranks = 1
    for axis in axes:
        with context.span("all_reduce", group="buffers", axis=axis, bytes=flat.nbytes):
            dist.all_reduce(flat, group=context.mesh.get_group(axis))
        num_ranks *= context.degrees[axis]
    flat /= num_ranks
    with torch.no_grad():
        for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))


def _changeable(context: RunContext) -> list[Tensor]:
    """Return the buffers that are saved: the others are recomputed from nothing, so they carry no statistics."""
    from torch.distributed.tensor import DTensor

    found: dict[int, Tensor] = {}
    for part in context.parts:
        persistent = part.module.state_dict(keep_vars=True).keys()
        for fqn, buffer in part.module.named_buffers():
            if fqn in persistent and buffer.is_floating_point() and not isinstance(buffer, DTensor):
                found[id(buffer)] = buffer
    return list(found.values())
