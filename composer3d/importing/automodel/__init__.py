"""NeMo Automodel's YAML: the rules of keys that decide together. Names under `_target_` are read, never imported."""

from __future__ import annotations

from composer3d.importing.automodel.recipe_keys import adapters, batch, model, optimizer, schedule, watched
from composer3d.importing.automodel.strategy import compiled, eight_bits, layout

__all__ = ["RULES"]

RULES = {
    "layout": layout,
    "batch": batch,
    "model": model,
    "optimizer": optimizer,
    "schedule": schedule,
    "eight_bits": eight_bits,
    "compiled": compiled,
    "adapters": adapters,
    "watched": watched,
}
