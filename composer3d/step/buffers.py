"""Buffers that training changes, averaged over ranks that read other samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d import torch_compat
from composer3d.mesh import Role
from composer3d.step.microbatches import Digest
from composer3d.step.rank_numbers import RankNumbers

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext
    from composer3d.interfaces import ParameterMesh

__all__ = ["NOTHING", "WHOLE", "UpdatedBuffers", "average_buffers", "held_in_part", "share_held_buffers"]

log = logging.getLogger(__name__)

WHOLE, NOTHING = slice(0, None), slice(0, 0)  # of `ParameterMesh.held`
_NAME = "updated_buffers"
_DIFFER = (
    "buffers that the model updates from a rank's own samples differ between data-parallel ranks: %s; %sa forward that "
    "uses them computes on every rank with its own; for one device's reduce what a forward adds to them over all ranks "
    "in the model (dist.all_reduce of a batch's sums and counts), as torch.nn.SyncBatchNorm does; where they are means "
    "over as many samples on every rank, run.sync_buffers() after every optimizer.step(), which averages them, is "
    "enough, and of sums and counts, as of the sizes of a codebook's clusters, it leaves a rank's mean; into a queue "
    "of samples, as MoCo's, write those of all ranks, which dist.all_gather brings"
)
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

    Those of experts are the holder's first, as of `share_held_buffers`, and averaged over several holders.

    Memory: one float64 copy of floating-point buffers, one int64 copy of the largest other one. Collectives: one
    all-reduce an axis of degree above 1, and that of `share_held_buffers`.
    """
    import torch
    import torch.distributed as dist

    share_held_buffers(context)
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


def share_held_buffers(context: RunContext) -> None:
    """Let ranks take buffers, or their rows, of experts that they do not hold from one that does, bit for bit.

    The holder alone runs an expert, as all ranks together would, so that its statistics and counters are the model's.

    Memory: the bytes of these buffers, once. Collectives: one all-reduce of these bytes over the axis of experts.
    """
    import torch
    import torch.distributed as dist

    found: dict[str, list[tuple[Tensor, ParameterMesh]]] = {}
    for fqn, buffer in _saved(context):
        if (own := held_in_part(context, fqn)) is not None:
            for axis in set(own.mesh.mesh_dim_names or ()).intersection(context.layout.names(Role.EXPERT)):
                found.setdefault(axis, []).append((buffer, own))
    for axis, buffers in found.items():
        own_bytes = [_held_bytes(buffer.detach(), own.held) for buffer, own in buffers]
        flat = torch.cat(own_bytes)
        with context.span("all_reduce", group="buffers", axis=axis, bytes=flat.nbytes):
            dist.all_reduce(flat, group=buffers[0][1].mesh[axis].get_group())
        pieces = flat.split([x.numel() for x in own_bytes])
        with torch.no_grad():
            for (buffer, own), piece in zip(buffers, pieces, strict=True):
                if own.held != WHOLE:
                    buffer.copy_(piece.clone().view(buffer.dtype).view_as(buffer))


def _held_bytes(buffer: Tensor, held: slice | None) -> Tensor:
    """Return a buffer's bytes, with zeros for rows that other ranks hold."""
    import torch

    kept = buffer
    if held != WHOLE:
        kept = torch.zeros_like(buffer)
        if held not in (None, NOTHING):
            kept[held] = buffer[held]
    return kept.reshape(-1).contiguous().view(torch.uint8)


def held_in_part(context: RunContext, fqn: str) -> ParameterMesh | None:
    """Return the mesh of what is inside of an expert, or of rows of experts, which ranks along their axis hold each."""
    own = context.parameter_mesh(fqn)
    return None if own is None or own.held is None else own


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


def _statistics(context: RunContext) -> set[str]:
    """Return the FQNs of buffers that may be each rank's own: batch norm's, and what modules have summed."""
    return {
        f"{fqn}.{name}".removeprefix(".")
        for part in context.parts
        for fqn, module in part.module.named_modules()
        for name in (*_STATISTICS, *getattr(module, "summed_buffers", ()))
        if hasattr(module, "track_running_stats") or name not in _STATISTICS
    }


def _warn(context: RunContext, averaged: Sequence[tuple[str, Tensor, Tensor]], differing: Sequence[str]) -> None:
    """Name buffers that are other ones than their mean, and whole numbers that differ, but for batch norm's."""
    statistics = _statistics(context)
    differ = [
        fqn
        for fqn, buffer, mean in averaged
        if fqn not in statistics and bool((mean.view_as(buffer).to(buffer.dtype) != buffer).any())
    ]
    counted = [fqn for fqn in differing if fqn not in statistics]
    context.stash(_Warned).is_done = bool(differ or counted)
    if differ:
        log.warning(_DIFFER, _names(differ), "they are averaged here, and between two averages ")
    if counted:
        log.warning(
            "buffers of whole numbers that the model updates from a rank's own samples differ between data-parallel "
            "ranks: %s; they are not averaged, every rank goes on with its own, and a checkpoint holds one rank's; sum "
            "what they count over all ranks in the model, or name them in the module's summed_buffers and use them in "
            "its after_step()",
            _names(counted),
        )


class UpdatedBuffers:
    """Names floating-point buffers that the first forwards change on ranks of other samples, each to other values.

    A digest of these travels with the step guard's numbers, where the model has such buffers.

    Memory: none. Collectives: none; the step guard's has one more number a rank.

    Args:
        context: Of a run, with its parts; all ranks of it make one.
    """

    def __init__(self, context: RunContext) -> None:
        self._context, self._numbers, self._digest = context, context.stash(RankNumbers), Digest()
        own = (fqn for fqn, _ in _changeable(context)[0] if held_in_part(context, fqn) is None)  # ranks have one each
        self._fqns = {*own} - _statistics(context)
        self._before: dict[str, int] = {}
        self._updated: set[str] = set()
        self._is_over = not self._fqns and context.degrees.get("pp", 1) == 1
        if not self._is_over:
            self._numbers.add(_NAME)

    def _watched(self) -> dict[str, Tensor]:
        everything = (pair for part in self._context.parts for pair in part.module.named_buffers())
        return {fqn: buffer for fqn, buffer in everything if fqn in self._fqns}

    def begin(self) -> None:
        """Begin a forward that trains."""
        if not self._is_over:
            self._before = {fqn: self._digest(buffer) for fqn, buffer in self._watched().items()}

    def end(self, *, is_last: bool) -> None:
        """End it, and record what it has changed.

        Args:
            is_last: Whether no later forward is looked at.
        """
        if self._is_over:
            return
        watched = self._watched()
        self._updated |= {fqn for fqn, buffer in watched.items() if self._digest(buffer) != self._before.get(fqn)}
        self._numbers.own[_NAME] = self._digest([watched[fqn] for fqn in sorted(self._updated)])
        self._is_over = is_last and not self._updated

    def compare(self) -> None:
        """Compare the digests of the last step that has begun, and name the buffers where they differ."""
        everyone = self._numbers.everyone.get(_NAME, ())
        if self._is_over or not any(everyone):
            return
        self._is_over, self._numbers.own[_NAME] = True, 0
        layout, own = self._context.layout, self._context.coordinates
        others = layout.names(Role.BATCH, Role.SEQUENCE)
        alike = [name for name in own if name not in others]
        found = {
            digest
            for rank, digest in zip(self._numbers.ranks, everyone, strict=True)
            if all(layout.coordinates(rank)[name] == own[name] for name in alike)
        }
        is_first = not any(own[name] for name in (*others, *layout.names(Role.TENSOR)))
        warned = self._context.stash(_Warned)
        if len(found) > 1 and is_first and not warned.is_done:
            log.warning(_DIFFER, _names(sorted(self._updated)), "")
        warned.is_done |= len(found) > 1


def _names(fqns: Sequence[str]) -> str:
    return ", ".join(fqns[:_SHOWN]) + f" and {len(fqns) - _SHOWN} more" * (len(fqns) > _SHOWN)


def _changeable(context: RunContext) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Return the buffers that are saved, floating-point ones and others; those not saved carry no statistics."""
    everything = [(fqn, buffer) for fqn, buffer in _saved(context) if not buffer.is_complex()]
    floats = [(fqn, buffer) for fqn, buffer in everything if buffer.is_floating_point()]
    return floats, [(fqn, buffer) for fqn, buffer in everything if not buffer.is_floating_point()]


def _saved(context: RunContext) -> list[tuple[str, Tensor]]:
    """Return the buffers that are saved, and are no shards; once each."""
    from torch.distributed.tensor import DTensor

    found: dict[int, tuple[str, Tensor]] = {}
    for part in context.parts:
        persistent = part.module.state_dict(keep_vars=True).keys()
        for fqn, buffer in part.module.named_buffers():
            if fqn in persistent and not isinstance(buffer, DTensor):
                found[id(buffer)] = (fqn, buffer)
    return [*found.values()]
