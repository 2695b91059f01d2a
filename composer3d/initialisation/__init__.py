"""The same model in every layout: weights as a function of the seed and of FQNs, never of ranks.

A factory runs once on meta under a recorder. Each parameter and buffer is then replayed alone, in full, from its own
history, sharded by its placement and freed. So `__init__`, `reset_parameters` and `apply` may all initialise weights,
and no rank ever holds more than its shards and one full tensor. Weights on disk are read part by part instead.
"""

from __future__ import annotations

from composer3d.initialisation.attachments import Attachments
from composer3d.initialisation.disk_weights import Slab, TensorSource, WeightsOnDisk
from composer3d.initialisation.identity import fingerprints, first_difference, seed_of
from composer3d.initialisation.placement import give_memory, materialise, place
from composer3d.initialisation.reachable import reachable_tensors
from composer3d.initialisation.recipe import Recipe, TensorSpec
from composer3d.initialisation.recorder import record
from composer3d.initialisation.ties import named_tensors, restore_ties, ties
from composer3d.initialisation.unreadable import unreadable

__all__ = [
    "Attachments",
    "Recipe",
    "Slab",
    "TensorSource",
    "TensorSpec",
    "WeightsOnDisk",
    "fingerprints",
    "first_difference",
    "give_memory",
    "materialise",
    "named_tensors",
    "place",
    "reachable_tensors",
    "record",
    "restore_ties",
    "seed_of",
    "ties",
    "unreadable",
]
