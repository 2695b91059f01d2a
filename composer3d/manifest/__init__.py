"""Manifests: TOML in, typed tables out, every mistake with its line."""

from __future__ import annotations

from composer3d.manifest.descriptions import describe_keys, fields, summary
from composer3d.manifest.document import Document, Place, read, read_text
from composer3d.manifest.layers import stated_by
from composer3d.manifest.load import InspectedManifest, Manifest, inspect_manifest, load_manifest, type_manifest
from composer3d.manifest.positions import KeyPath, locate
from composer3d.manifest.references import FILL_IN, make_importable, resolve_reference
from composer3d.manifest.regular_expressions import Expression, SlowExpression, search
from composer3d.manifest.schema import json_schema
from composer3d.manifest.secret import HIDDEN, Secret, hide, redacted
from composer3d.manifest.sources import kind_of_file, shipped
from composer3d.manifest.tables import (
    CORE_TABLES,
    MOST_SAMPLES,
    TABLE_CONFIG,
    MeshTable,
    ModelTable,
    TrainTable,
    mesh_table,
    table,
    validate,
)
from composer3d.manifest.toml_writer import dump, inline
from composer3d.manifest.wording import expected

__all__ = [
    "MOST_SAMPLES",
    "CORE_TABLES",
    "Document",
    "Expression",
    "FILL_IN",
    "HIDDEN",
    "InspectedManifest",
    "KeyPath",
    "Manifest",
    "MeshTable",
    "ModelTable",
    "Place",
    "Secret",
    "SlowExpression",
    "TABLE_CONFIG",
    "TrainTable",
    "describe_keys",
    "dump",
    "expected",
    "fields",
    "hide",
    "redacted",
    "inline",
    "inspect_manifest",
    "json_schema",
    "kind_of_file",
    "load_manifest",
    "locate",
    "mesh_table",
    "read",
    "read_text",
    "make_importable",
    "resolve_reference",
    "search",
    "shipped",
    "stated_by",
    "summary",
    "table",
    "type_manifest",
    "validate",
]
