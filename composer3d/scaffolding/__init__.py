"""Packages of plugins, written with their tests as a beginning."""

from __future__ import annotations

from composer3d.scaffolding.new_plugin import NewPlugin, new_plugin

__all__ = ["NewPlugin", "new_plugin"]
