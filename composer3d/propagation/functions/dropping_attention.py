"""Attention inside of propagations, whose dropout is drawn by modes around them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation.functions.shape_rules import ShapeRules

__all__ = ["attend_drawing"]


def attend_drawing(*args: Any, **options: Any) -> Tensor:
    """Call `scaled_dot_product_attention`, inside of propagations that do not see it, so that modes that draw do."""
    result: Tensor = torch_compat.call_beside(ShapeRules, F.scaled_dot_product_attention, args, options)
    return result
