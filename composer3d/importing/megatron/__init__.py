"""Megatron-LM's flags: the rules of those that decide together."""

from __future__ import annotations

from dataclasses import replace

from composer3d.importing.documents_inside import documents_inside
from composer3d.importing.leaves import Leaf, SourceTree
from composer3d.importing.megatron.annealing import schedule
from composer3d.importing.megatron.degrees import layout
from composer3d.importing.megatron.dependents import dependents
from composer3d.importing.megatron.iterations import batch
from composer3d.importing.megatron.memory import offload, recomputation
from composer3d.importing.megatron.shapes import data, model
from composer3d.importing.megatron.stepping import optimizer, precision
from composer3d.importing.megatron.watching import saving

__all__ = ["RULES", "normalised"]

RULES = {
    "layout": layout,
    "batch": batch,
    "model": model,
    "data": data,
    "documents": documents_inside,
    "precision": precision,
    "recomputation": recomputation,
    "offload": offload,
    "optimizer": optimizer,
    "schedule": schedule,
    "saving": saving,
    "dependents": dependents,
}
_BLOCKS = ("language_model", "model_parallel")


def normalised(tree: SourceTree) -> SourceTree:
    """Return the tree with every flag at the top: files of functional tests and `--yaml-cfg` nest them."""
    leaves: dict[str, Leaf] = {}
    for leaf in tree.leaves.values():
        path = leaf.path
        if path[0] == "MODEL_ARGS" or (path[0] in _BLOCKS and len(path) > 1):
            path = path[1:]
        path = (path[0].lstrip("-").replace("-", "_"), *path[1:])
        found = replace(leaf, path=path, written=leaf.shown)
        leaves[found.key] = found
    return replace(tree, leaves=leaves)
