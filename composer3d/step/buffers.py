"""Buffers that training changes, averaged over ranks that read other samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d import torch_compat
from composer3d.mesh import Role

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext

__all__ = ["average_buffers"]

log = logging.getLogger(__name__)

_SHOWN = 3  # names in a message


@dataclass
class _Warned:
    """Stash of whether buffers that differ were named already."""

    is_done: bool = False


def average_buffers(context: RunContext) -> None:
    """Replace every persistent floating-point buffer by its mean over the ranks that read other samples or positions.

    Batch-norm's running mean comes out as that of all ranks' samples; its running variance as the mean of the ranks'
    variances, which leaves out what their means differ by. (torch.nn.SyncBatchNorm has exact statistics, for two
    collectives a layer and step.) Buffers that are equal everywhere stay as they are to the last bit: the mean is taken
    in float64, where summing equal float32 numbers and dividing is exact. Evaluation and checkpoints are then the same
    on every rank, and training is not changed by it, as batch-norm trains with the batch's statistics. Other buffers
    that differ, which training may use, are named in a warning, once: between two averages every rank has its own.

    Memory: one float64 copy of the buffers. Collectives: one all-reduce an axis of degree above 1.
    """
    import torch
    import torch.distributed as dist

    axes = [name for name in context.layout.names(Role.BATCH, Role.SEQUENCE) if context.degrees[name] > 1]
    buffers = _changeable(context)
    if not axes or not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).to(torch.float64) for _, buffer in buffers])
    num_ranks = 1
    for axis in axes:
        with context.span("all_reduce", group="buffers", axis=axis, bytes=flat.nbytes):
            dist.all_reduce(flat, group=context.mesh.get_group(axis))
        num_ranks *= context.degrees[axis]
    flat /= num_ranks
    means = flat.split([buffer.numel() for _, buffer in buffers])
    if torch_compat.active_fake_mode() is None:
        _warn(context, axes, [(fqn, buffer, mean) for (fqn, buffer), mean in zip(buffers, means, strict=True)])
    with torch.no_grad():
        for (_, buffer), mean in zip(buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))


def _warn(context: RunContext, axes: list[str], found: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Name buffers that are other ones than their mean and no batch norm's; on the first rank of those averaged."""
    warned, others = context.stash(_Warned), [*axes, *context.layout.names(Role.TENSOR)]
    if warned.is_done or any(context.coordinates[axis] for axis in others):
        return
    statistics = {
        f"{fqn}.{name}".removeprefix(".")
        for part in context.parts
        for fqn, module in part.module.named_modules()
        if hasattr(module, "track_running_stats")
        for name in ("running_mean", "running_var")
    }
    differ = [
        fqn
        for fqn, buffer, mean in found
        if fqn not in statistics and bool((mean.view_as(buffer).to(buffer.dtype) != buffer).any())
    ]
    if differ:
        warned.is_done = True
        names = ", ".join(differ[:_SHOWN]) + f" and {len(differ) - _SHOWN} more" * (len(differ) > _SHOWN)
        log.warning(
            "buffers that the model updates from a rank's own samples differ between data-parallel ranks: %s; they are "
            "averaged here, and between two averages a forward that uses them computes on every rank with its own; "
            "write run.sync_buffers() after every optimizer.step(), or reduce the batch's statistics over all ranks in "
            "the model, as torch.nn.SyncBatchNorm does",
            names,
        )


def _changeable(context: RunContext) -> list[tuple[str, Tensor]]:
    """Return the buffers that are saved: the others are recomputed from nothing, so they carry no statistics."""
    from torch.distributed.tensor import DTensor

    found: dict[int, tuple[str, Tensor]] = {}
    for part in context.parts:
        persistent = part.module.state_dict(keep_vars=True).keys()
        for fqn, buffer in part.module.named_buffers():
            if fqn in persistent and buffer.is_floating_point() and not isinstance(buffer, DTensor):
                found[id(buffer)] = (fqn, buffer)
    return list(found.values())
