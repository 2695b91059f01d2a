"""Configurations of other systems as texts, translated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli

from composer3d.importing.commented_manifest import write_manifest
from composer3d.importing.importer import read_translation
from composer3d.importing.translation import Options, Translation


def translated(folder: Path, name: str, text: str, *, system: str | None = None, **options: Any) -> Translation:
    """Return what becomes of a file of that text, before it is checked."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return read_translation(file, Options(**options), system=system)


def manifest_of(translation: Translation) -> dict[str, Any]:
    """Return the manifest that is written, as TOML reads it."""
    return tomli.loads(write_manifest(translation))


def verdicts_of(translation: Translation) -> dict[str, str]:
    """Return the verdict of every key."""
    return {key: str(entry.verdict) for key, entry in translation.verdicts.items()}
