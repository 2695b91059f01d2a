"""Arguments of transformers' Trainer: the rules of keys that decide together."""

from __future__ import annotations

from composer3d.importing.instruction_data import fine_tuned, named_data
from composer3d.importing.trainer.hyperparameters import batch, optimizer, smoothing
from composer3d.importing.trainer.learning_rates import schedule
from composer3d.importing.trainer.options import precision, saving, sharded, switches

__all__ = ["RULES"]

RULES = {
    "sharded": sharded,
    "batch": batch,
    "optimizer": optimizer,
    "schedule": schedule,
    "smoothing": smoothing,
    "precision": precision,
    "switches": switches,
    "saving": saving,
    "fine_tuned": fine_tuned,
    "instruction_data": named_data,
}
