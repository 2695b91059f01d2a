"""Checkpoints of other systems, read as data and written as composer3d's, from which a run goes on."""

from __future__ import annotations

from composer3d.importing.foreign_checkpoints.checkpoint_import import ImportedCheckpoint, import_checkpoint

__all__ = ["ImportedCheckpoint", "import_checkpoint"]
