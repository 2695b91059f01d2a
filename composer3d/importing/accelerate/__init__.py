"""Accelerate's YAML: the rules of keys that decide together."""

from __future__ import annotations

from composer3d.importing.accelerate.autocast import precision
from composer3d.importing.accelerate.launched import compiled, degrees, layout, megatron
from composer3d.importing.accelerate.sharding_backends import deepspeed, sharded

__all__ = ["RULES"]

RULES = {
    "layout": layout,
    "degrees": degrees,
    "sharded": sharded,
    "deepspeed": deepspeed,
    "megatron": megatron,
    "precision": precision,
    "compiled": compiled,
}
