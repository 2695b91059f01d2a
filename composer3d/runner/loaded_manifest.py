"""`load_manifest` as a call: a manifest, typed by the tables that it is meant for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.manifest import CORE_TABLES, Manifest, fields, read, type_manifest

if TYPE_CHECKING:
    from composer3d.registry import Catalogue

__all__ = ["load_manifest"]


def load_manifest(
    source: str | Path,
    *,
    overrides: Sequence[str] = (),
    tables: Mapping[str, type] | None = None,
    catalogue: Catalogue | None = None,
) -> Manifest:
    """Read a manifest and type it.

    Args:
        source: A path, or the name of a shipped manifest.
        overrides: `table.key=value`, as `--set` takes them.
        tables: Tables beyond the core's, or with more keys than the core's; default: those of a run,
            `composer3d.runner.TABLES`, where the manifest states anything that only a run uses, and else none, as
            `compose` has it.
        catalogue: Catalogue of plugins; default: the installed ones.

    Raises:
        ManifestError: With every mistake of the file.
    """
    document = read(source, overrides)
    if tables is None and _is_of_a_run(document.tables):
        from composer3d.runner import TABLES

        tables = TABLES
    return type_manifest(document, tables=tables, catalogue=catalogue)


def _is_of_a_run(stated: Mapping[str, Any]) -> bool:
    """Return whether tables or keys are stated that `compose` does not know, and `run` does."""
    from composer3d.runner import TABLES

    own = {name: set(fields(cls)) - set(fields(CORE_TABLES.get(name, object))) for name, cls in TABLES.items()}
    return any(
        name in own and (name not in CORE_TABLES or not isinstance(table, Mapping) or own[name] & table.keys())
        for name, table in stated.items()
    )
