"""Templates: packages of plugins with their tests, and manifests."""

from __future__ import annotations

from composer3d.scaffolding.new_plugin import NewPlugin, filled, new_plugin

__all__ = ["NewPlugin", "filled", "new_plugin"]
