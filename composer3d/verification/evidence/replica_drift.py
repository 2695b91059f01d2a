"""Replicas that must be equal bit for bit: parameters, gradients and buffers on ranks with the same shard."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d.mesh import Layout, Role
from composer3d.step import local

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = ["Drift", "Holding", "compare_replicas", "held_buffers", "held_tensors", "saved_buffers"]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One rank's shard of a tensor.

    Args:
        piece: Which shard it is: (axis, index) of every axis along which it is sharded, and the local shape.
        placement: As text, for the report.
        digest: Of the local bytes.
    """

    piece: tuple[Any, ...]
    placement: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Replicas that differ.

    Args:
        what: parameters, gradients or buffers.
        fqn: Of the tensor.
        axes: Axes along which replicas differ; empty where they differ only along several axes at once.
        ranks: Two ranks that differ.
    """

    what: str
    fqn: str
    axes: tuple[str, ...]
    ranks: tuple[int, int]


def held_tensors(run: Composition, named: Iterable[tuple[str, Tensor]]) -> dict[str, Holding]:
    """Return this rank's shard of each named tensor. Collectives: none."""
    return {fqn: _holding(run, fqn, tensor) for fqn, tensor in named}


def saved_buffers(run: Composition) -> dict[str, Tensor]:
    """Return this rank's buffers that are saved; the others are recomputed from nothing."""
    found: dict[str, Tensor] = {}
    for part in run.parts:
        persistent = part.module.state_dict(keep_vars=True).keys()
        found |= {fqn: buffer for fqn, buffer in part.module.named_buffers() if fqn in persistent}
    return found


def held_buffers(run: Composition) -> dict[str, Holding]:
    """Return this rank's shard of every persistent buffer."""
    return {fqn: _holding(run, fqn, buffer) for fqn, buffer in saved_buffers(run).items()}


def _holding(run: Composition, fqn: str, tensor: Tensor) -> Holding:
    import torch
    from torch.distributed.tensor import DTensor

    piece: list[Any] = []
    placement = "replicated"
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        here: Any = mesh.get_coordinate() or []
        names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
        sharded = [(dim, p) for dim, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(dim) > 1]
        piece += [(names[dim], here[dim]) for dim, _ in sharded]
        placement = ", ".join(f"{p} over {names[dim]}" for dim, p in sharded) or placement
    own = run.context.parameter_mesh(fqn)
    if own is not None and not isinstance(tensor, DTensor):
        experts = [name for name in run.context.layout.names(Role.EXPERT) if name in (own.mesh.mesh_dim_names or ())]
        piece += [(name, run.coordinates[name]) for name in experts]
        placement = f"apart over {', '.join(experts)}" if experts else placement
    apart = run.context.layout.names(Role.INDEPENDENT)
    piece += [(name, run.coordinates[name]) for name in apart]
    values = local(tensor.detach()).cpu().contiguous()
    digest = hashlib.blake2b(values.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
    return Holding(piece=(*piece, tuple(values.shape)), placement=placement, digest=digest)


def compare_replicas(what: str, ranks: Sequence[Mapping[str, Holding]], layout: Layout) -> list[Drift]:
    """Return every tensor of which two ranks hold the same shard with different bits.

    Args:
        what: parameters, gradients or buffers.
        ranks: Shards of every rank, by rank and FQN.
        layout: Axes and degrees of the run.
    """
    holders: dict[tuple[str, Any], list[int]] = defaultdict(list)
    for rank, held in enumerate(ranks):
        for fqn, holding in held.items():
            holders[fqn, holding.piece].append(rank)
    drifts: dict[str, Drift] = {}
    for (fqn, _), members in holders.items():
        pairs = [
            (one, other)
            for index, one in enumerate(members)
            for other in members[index + 1 :]
            if ranks[one][fqn].digest != ranks[other][fqn].digest
        ]
        if pairs:
            found = drifts.get(fqn)
            axes = {*(found.axes if found else ()), *_axes(pairs, layout)}
            ordered = tuple(axis.name for axis in layout.dense_axes if axis.name in axes)
            drifts[fqn] = Drift(what=what, fqn=fqn, axes=ordered, ranks=pairs[0])
    return sorted(drifts.values(), key=lambda drift: drift.fqn)


def _axes(pairs: Sequence[tuple[int, int]], layout: Layout) -> set[str]:
    """Return the axes along which ranks that are equal in all other coordinates differ."""
    result = set()
    for one, other in pairs:
        here, there = layout.coordinates(one), layout.coordinates(other)
        different = [axis.name for axis in layout.dense_axes if here[axis.name] != there[axis.name]]
        if len(different) == 1:
            result.add(different[0])
    return result
