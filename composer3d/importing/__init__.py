"""Configurations of other systems as manifests, with a verdict for every key."""

from __future__ import annotations

from composer3d.importing.importer import import_config
from composer3d.importing.key_tables import systems
from composer3d.importing.verdicts import ImportResult, KeyVerdict, Verdict

__all__ = ["ImportResult", "KeyVerdict", "Verdict", "import_config", "systems"]
