"""Meshes that make the groups of one rank only, where no other rank exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["own_groups"]

_INIT, _ROWS = "_init_one_process_group", "remap_to_tensor"


@contextmanager
def own_groups(rank: int) -> Iterator[None]:
    """Have meshes made inside ask for the groups of this rank alone, in all dims: no other rank makes the others.

    For each dim torch walks over all groups: in a world of 16,384 ranks with degrees of 1 they are 36,000, for 0.3 s of
    CPU time a mesh. The method that walks, and the one that gives it the groups' ranks, are private (torch 2.13; where
    there is none, all groups are asked for, and nothing else changes).

    Args:
        rank: Global, of this process.
    """
    from torch.distributed import device_mesh

    module: Any = device_mesh
    mesh, layouts = module.DeviceMesh, getattr(module, "_MeshLayout", None)
    before = vars(mesh).get(_INIT)
    rows = getattr(layouts, _ROWS, None)
    if before is None or rows is None:
        yield
        return
    init = getattr(mesh, _INIT)

    def own(self: Any, ranks: Any) -> Any:
        groups = rows(self, ranks)
        return groups[(groups == rank).flatten(1).any(1)]

    def init_one(*args: Any, **options: Any) -> Any:
        setattr(layouts, _ROWS, own)
        try:
            return init(*args, **options)
        finally:
            setattr(layouts, _ROWS, rows)

    setattr(mesh, _INIT, staticmethod(init_one))
    try:
        yield
    finally:
        setattr(mesh, _INIT, before)
