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
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_ODD = 0x9E3779B97F4A7C15 - 2**64  # in which bits of neighbours differ; int64 wraps around
_DIGEST_BITS = 2**40 - 1


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
    So are whole numbers that differ, which have no mean: a digest of each is compared.

    Memory: one float64 copy of floating-point buffers, one int64 copy of the largest other one. Collectives: one
    all-reduce an axis of degree above 1.
    """
    import torch
    import torch.distributed as dist

    axes = [name for name in context.layout.names(Role.BATCH, Role.SEQUENCE) if context.degrees[name] > 1]
    buffers, counts = _changeable(context)
    if not axes or not (buffers or counts):
        return
    flat = torch.cat([*(each.reshape(-1).to(torch.float64) for _, each in buffers), *(_digest(x) for _, x in counts)])
    own = flat.clone() if counts else flat
    num_ranks = 1
    for axis in axes:
        with context.span("all_reduce", group="buffers", axis=axis, bytes=flat.nbytes):
            dist.all_reduce(flat, group=context.mesh.get_group(axis))
        num_ranks *= context.degrees[axis]
    flat /= num_ranks
    means = flat.split([buffer.numel() for _, buffer in buffers] + [1] * len(counts))
    if torch_compat.active_fake_mode() is None and not _is_reported(context, axes):
        averaged = [(fqn, buffer, mean) for (fqn, buffer), mean in zip(buffers, means, strict=False)]
        start = flat.numel() - len(counts)
        differing = (flat[start:] != own[start:]).tolist()
        _warn(context, averaged, [fqn for (fqn, _), differs in zip(counts, differing, strict=True) if differs])
    with torch.no_grad():
        for (_, buffer), mean in zip(buffers, means, strict=False):
            buffer.copy_(mean.view_as(buffer))


def _digest(counts: Tensor) -> Tensor:
    """Return a whole number below 2**40 of a buffer's values, of which float64 adds up thousands exactly."""
    import torch

    values = counts.reshape(-1).to(torch.int64)
    weights = torch.arange(1, values.numel() + 1, device=values.device) * _ODD
    return ((values * weights).sum() & _DIGEST_BITS).to(torch.float64).reshape(1)


def _is_reported(context: RunContext, axes: list[str]) -> bool:
    """Whether buffers that differ are another rank's to name, or were named already."""
    others = [*axes, *context.layout.names(Role.TENSOR)]
    return context.stash(_Warned).is_done or any(context.coordinates[axis] for axis in others)


def _warn(context: RunContext, averaged: Sequence[tuple[str, Tensor, Tensor]], differing: Sequence[str]) -> None:
    """Name buffers that are other ones than their mean, and whole numbers that differ, but for batch norm's."""
    statistics = {
        f"{fqn}.{name}".removeprefix(".")
        for part in context.parts
        for fqn, module in part.module.named_modules()
        for name in (*_STATISTICS, *getattr(module, "summed_buffers", ()))
        if hasattr(module, "track_running_stats") or name not in _STATISTICS
    }
    differ = [
        fqn
        for fqn, buffer, mean in averaged
        if fqn not in statistics and bool((mean.view_as(buffer).to(buffer.dtype) != buffer).any())
    ]
    counted = [fqn for fqn in differing if fqn not in statistics]
    context.stash(_Warned).is_done = bool(differ or counted)
    if differ:
        log.warning(
            "buffers that the model updates from a rank's own samples differ between data-parallel ranks: %s; they are "
            "averaged here, and between two averages a forward that uses them computes on every rank with its own; "
            "write run.sync_buffers() after every optimizer.step() of a loop, or reduce the batch's statistics over "
            "all ranks in the model, as torch.nn.SyncBatchNorm does; into a queue of samples, as MoCo's, write those "
            "of all ranks, which dist.all_gather brings",
            _names(differ),
        )
    if counted:
        log.warning(
            "buffers of whole numbers that the model updates from a rank's own samples differ between data-parallel "
            "ranks: %s; they are not averaged, every rank goes on with its own, and a checkpoint holds one rank's; sum "
            "what they count over all ranks in the model, or name them in the module's summed_buffers and use them in "
            "its after_step()",
            _names(counted),
        )


def _names(fqns: Sequence[str]) -> str:
    return ", ".join(fqns[:_SHOWN]) + f" and {len(fqns) - _SHOWN} more" * (len(fqns) > _SHOWN)


def _changeable(context: RunContext) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Return the buffers that are saved, floating-point ones and others; those not saved carry no statistics."""
    from torch.distributed.tensor import DTensor

    floats: dict[int, tuple[str, Tensor]] = {}
    counts: dict[int, tuple[str, Tensor]] = {}
    for part in context.parts:
        persistent = part.module.state_dict(keep_vars=True).keys()
        for fqn, buffer in part.module.named_buffers():
            if fqn in persistent and not isinstance(buffer, DTensor) and not buffer.is_complex():
                (floats if buffer.is_floating_point() else counts)[id(buffer)] = (fqn, buffer)
    return list(floats.values()), list(counts.values())
