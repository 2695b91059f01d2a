"""Size of a group of ranks, of which several train one model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from composer3d.errors import MeshError
from composer3d.mesh import Axis, Role

__all__ = ["ranks_of_group"]


def ranks_of_group(stated: Mapping[str, int | None], *, axes: Sequence[Axis], num_ranks: int) -> int:
    """Return the number of ranks per group.

    Raises:
        MeshError: They do not divide.
    """
    groups = {axis.name: stated.get(axis.name) or 1 for axis in axes if axis.role is Role.REPLICA}
    num_groups = math.prod(max(degree, 1) for degree in groups.values())
    if num_ranks % num_groups:
        shown = " x ".join(f"{name}={degree}" for name, degree in groups.items())
        raise MeshError(f"{num_ranks} ranks do not divide into groups of equal size: {shown}")
    return num_ranks // num_groups
