"""Manifests: TOML in, typed tables out, every mistake with its line."""

from __future__ import annotations

from composer3d.manifest.document import Document, Place, read, read_text
from composer3d.manifest.load import InspectedManifest, Manifest, inspect_manifest, load_manifest, type_manifest
from composer3d.manifest.positions import KeyPath, locate
from composer3d.manifest.references import resolve_reference
from composer3d.manifest.schema import json_schema
from composer3d.manifest.sources import shipped
from composer3d.manifest.tables import (
    CORE_TABLES,
    TABLE_CONFIG,
    MeshTable,
    ModelTable,
    TrainTable,
    mesh_table,
    table,
    validate,
)

__all__ = [
    "CORE_TABLES",
    "TABLE_CONFIG",
    "Document",
    "InspectedManifest",
    "KeyPath",
    "Manifest",
    "MeshTable",
    "ModelTable",
    "Place",
    "TrainTable",
    "inspect_manifest",
    "json_schema",
    "load_manifest",
    "locate",
    "mesh_table",
    "read",
    "read_text",
    "resolve_reference",
    "shipped",
    "table",
    "type_manifest",
    "validate",
]
