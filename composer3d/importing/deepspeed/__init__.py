"""DeepSpeed's JSON: the rules of keys that decide together."""

from __future__ import annotations

from composer3d.importing.deepspeed.batch_sizes import batch, clipping
from composer3d.importing.deepspeed.low_precision import foreign_precision, precision
from composer3d.importing.deepspeed.optimizing import optimizer
from composer3d.importing.deepspeed.partitioning import layout, offload, zero
from composer3d.importing.deepspeed.remaining import compiled, elasticity, other_algorithms, watching
from composer3d.importing.deepspeed.warming_up import schedule

__all__ = ["RULES"]

RULES = {
    "layout": layout,
    "zero": zero,
    "batch": batch,
    "clipping": clipping,
    "precision": precision,
    "foreign_precision": foreign_precision,
    "offload": offload,
    "optimizer": optimizer,
    "schedule": schedule,
    "watching": watching,
    "compiled": compiled,
    "elasticity": elasticity,
    "other_algorithms": other_algorithms,
}
