"""Fake tensors and fake process groups: sizes without values."""

from __future__ import annotations

from composer3d.torch_compat.fakes.fake_tensors import value_errors

__all__ = ["value_errors"]
