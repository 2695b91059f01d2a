"""Typed calls of a run's plugins, one method per hook, with results validated against the spec."""

from __future__ import annotations

from composer3d.hooks.blame import HooksInTurn, blamed, blamed_listing
from composer3d.hooks.typed_calls import Bound, Hooks

__all__ = ["Bound", "Hooks", "HooksInTurn", "blamed", "blamed_listing"]
