"""Fake tensors and fake process groups: sizes without values."""

from __future__ import annotations

from composer3d.torch_compat.fakes.dispatch_rules import rules_at_hand
from composer3d.torch_compat.fakes.fake_tensors import value_errors

__all__ = ["rules_at_hand", "value_errors"]
