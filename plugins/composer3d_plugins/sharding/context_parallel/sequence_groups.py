"""Process groups of the ranks that share a sequence; those of usp divide them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["SequenceGroup", "divided_group", "sequence_group"]


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """The ranks that share a sequence.

    Args:
        name: Of their process group.
        rank: This rank's place.
        degree: How many there are.
        inner: Process group of the neighbouring ranks that exchange heads for positions; usp only.
        inner_degree: How many there are of them; usp only.
        outer: Process group of the ranks with the same place in theirs, which are a ring; usp only.
    """

    name: str
    rank: int
    degree: int
    inner: str = ""
    inner_degree: int = 1
    outer: str = ""

    @classmethod
    def of(cls, group: Any, *, inner: Any = None, outer: Any = None) -> SequenceGroup:
        """Return what process groups are; `inner` and `outer` divide the group for usp."""
        names = [torch_compat.group_name(each) if each is not None else "" for each in (inner, outer)]
        return cls(
            name=torch_compat.group_name(group),
            rank=dist.get_rank(group),
            degree=dist.get_world_size(group),
            inner=names[0],
            inner_degree=dist.get_world_size(inner) if inner is not None else 1,
            outer=names[1],
        )


def divided_group(mesh: DeviceMesh, *, axis: str, inner_degree: int) -> SequenceGroup:
    """Return the ranks along an axis, with the process groups of usp: neighbours exchange heads, the others are a ring.

    Every rank of the world calls it, at the same place. Collectives: none, but for making the groups.

    Args:
        mesh: Of the world.
        axis: Along which the sequence is sharded.
        inner_degree: Neighbouring ranks that exchange heads; divides the axis' degree.
    """
    names = mesh.mesh_dim_names or ()
    by_place = mesh.mesh.movedim(names.index(axis), -1).reshape(-1, mesh[axis].size() // inner_degree, inner_degree)
    groups = []
    for lists in (by_place.flatten(0, 1), by_place.transpose(1, 2).flatten(0, 1)):
        group: Any
        group, _ = dist.new_subgroups_by_enumeration(lists.tolist())
        torch_compat.inherit_timeouts(group)
        groups.append(group)
    return SequenceGroup.of(mesh.get_group(axis), inner=groups[0], outer=groups[1])


def sequence_group(mesh: DeviceMesh, *, axis: str, inner_degree: int) -> SequenceGroup:
    """Return the ranks along an axis, divided where neighbours exchange heads; arguments as of `divided_group`."""
    if inner_degree > 1:
        return divided_group(mesh, axis=axis, inner_degree=inner_degree)
    return SequenceGroup.of(mesh.get_group(axis))
