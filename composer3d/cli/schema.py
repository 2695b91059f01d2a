"""`composer3d schema`: the JSON schema of manifests, for editors."""

from __future__ import annotations

import argparse
from pathlib import Path

from composer3d.cli.options import Subparsers
from composer3d.cli.output import complain, say
from composer3d.errors import PluginError

__all__ = ["SCHEMA_FILE", "add", "execute", "heading", "schema_text", "write_schema"]

# Editors take it from the line `#:schema` of a manifest, beside which it lies; Taplo and those who follow it.
SCHEMA_FILE = "composer3d.schema.json"


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "schema",
        help="print the JSON schema of manifests, with the plugins that are installed",
        description="Print the JSON schema (draft 2020-12) of manifests with the plugins that are installed here. "
        "Editors complete and check manifests with it.",
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    say(schema_text())
    return 0


def heading() -> str:
    """Return the first line of a manifest whose schema lies beside it."""
    return f"#:schema {SCHEMA_FILE}\n"


def write_schema(folder: Path) -> int:
    """Write the schema for editors into a manifest's folder, over one of another time; 2 where it cannot be."""
    path = folder / SCHEMA_FILE
    try:
        path.write_text(f"{schema_text()}\n", encoding="utf-8")
    except OSError as error:
        complain(f"{path} cannot be written: {(error.strerror or str(error)).lower()}")
        return 2
    return 0


def schema_text() -> str:
    """Return the schema; plugins that cannot be imported are named on standard error and left out."""
    import json

    from composer3d.manifest import CORE_TABLES, json_schema, mesh_table
    from composer3d.registry import FAMILIES, Catalogue, info_of
    from composer3d.runner import TABLES

    catalogue = Catalogue.installed()
    plugins: dict[str, dict[str, type]] = {family: {} for family in FAMILIES}
    axes: list[str] = []
    for name in catalogue.names():
        try:
            cls = catalogue.load(name)
        except PluginError as error:
            complain(f"left out: {error}")
            continue
        info = info_of(cls)
        assert info is not None, "the catalogue checks it"
        plugins[info.family][name] = cls
        axes += [axis.name for axis in info.axes]
    tables = {**CORE_TABLES, **TABLES, "mesh": mesh_table(axes)}
    return json.dumps(json_schema(tables, plugins), indent=1)
