"""Manifests as configurations of other systems, with a verdict for every key."""

from __future__ import annotations

from composer3d.exporting.config_export import export_config
from composer3d.exporting.export_result import ExportedKey, ExportResult
from composer3d.exporting.writers import targets

__all__ = ["ExportResult", "ExportedKey", "export_config", "targets"]
