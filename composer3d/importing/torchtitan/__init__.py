"""torchtitan's TOML: the rules of keys that decide together."""

from __future__ import annotations

from composer3d.importing.torchtitan.job_config import FLAVOURS, batch, model, optimizer, saving, schedule
from composer3d.importing.torchtitan.parallel_dims import layout
from composer3d.importing.torchtitan.switches import compiled, eight_bits, recomputation, watching

__all__ = ["FLAVOURS", "RULES"]

RULES = {
    "layout": layout,
    "batch": batch,
    "model": model,
    "optimizer": optimizer,
    "schedule": schedule,
    "saving": saving,
    "recomputation": recomputation,
    "compiled": compiled,
    "eight_bits": eight_bits,
    "watching": watching,
}
