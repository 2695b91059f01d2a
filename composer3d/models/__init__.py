"""Reference models in plain torch: no line of them knows about parallelism."""

from __future__ import annotations

from composer3d.models.flops import num_flops_per_token
from composer3d.models.llama import Llama, llama
from composer3d.models.moe import MoE, moe

__all__ = ["Llama", "MoE", "llama", "moe", "num_flops_per_token"]
