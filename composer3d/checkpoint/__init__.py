"""Atomic, sharded, asynchronous, resharding checkpoints over torch.distributed.checkpoint, read without executing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes.late_imports import late_imports

if TYPE_CHECKING:
    from composer3d.checkpoint.archive import STORAGE_DTYPES
    from composer3d.checkpoint.checkpoint_folder import complete, latest, prune
    from composer3d.checkpoint.find import find_checkpoint, other_than
    from composer3d.checkpoint.loading import load
    from composer3d.checkpoint.optimizer_state import (
        initialise_optimizer_state,
        load_optimizer_json,
        match_optimizer_state,
        optimizer_tensors,
    )
    from composer3d.checkpoint.reader import (
        Saved,
        TensorInfo,
        contents,
        open_foreign,
        read_into,
        read_tensor,
        read_tensors,
    )
    from composer3d.checkpoint.restricted_pickle import Asked
    from composer3d.checkpoint.saving import AFTER_ERROR_S, AsyncSaver, save
    from composer3d.checkpoint.staging import Staging
    from composer3d.checkpoint.state_file import read_state
    from composer3d.checkpoint.state_schema import validated_composition, validated_run
    from composer3d.checkpoint.wrappers import unwrapped

_MODULES = {
    "archive": ("STORAGE_DTYPES",),
    "checkpoint_folder": ("complete", "latest", "prune"),
    "find": ("find_checkpoint", "other_than"),
    "loading": ("load",),
    "optimizer_state": (
        "initialise_optimizer_state",
        "load_optimizer_json",
        "match_optimizer_state",
        "optimizer_tensors",
    ),
    "reader": ("Saved", "TensorInfo", "contents", "open_foreign", "read_into", "read_tensor", "read_tensors"),
    "restricted_pickle": ("Asked",),
    "saving": ("AFTER_ERROR_S", "AsyncSaver", "save"),
    "staging": ("Staging",),
    "state_file": ("read_state",),
    "state_schema": ("validated_composition", "validated_run"),
    "wrappers": ("unwrapped",),
}

__all__ = [
    "AFTER_ERROR_S",
    "Asked",
    "AsyncSaver",
    "STORAGE_DTYPES",
    "Saved",
    "Staging",
    "TensorInfo",
    "complete",
    "contents",
    "find_checkpoint",
    "initialise_optimizer_state",
    "latest",
    "load",
    "load_optimizer_json",
    "match_optimizer_state",
    "open_foreign",
    "optimizer_tensors",
    "other_than",
    "prune",
    "read_into",
    "read_state",
    "read_tensor",
    "read_tensors",
    "save",
    "unwrapped",
    "validated_composition",
    "validated_run",
]

__getattr__ = late_imports(__name__, _MODULES)
