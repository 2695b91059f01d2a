"""Configurations of other systems as manifests, with a verdict for every key."""

from __future__ import annotations

from composer3d.importing.commented_manifest import write_manifest
from composer3d.importing.importer import import_config, translate_tree
from composer3d.importing.key_tables import KeyTable, load_key_table, path_of, systems
from composer3d.importing.leaves import SourceTree
from composer3d.importing.source_file import parse
from composer3d.importing.translation import Options, Translation
from composer3d.importing.verdicts import ImportResult, KeyVerdict, Verdict

__all__ = [
    "ImportResult",
    "KeyTable",
    "KeyVerdict",
    "Options",
    "SourceTree",
    "Translation",
    "Verdict",
    "import_config",
    "load_key_table",
    "parse",
    "path_of",
    "systems",
    "translate_tree",
    "write_manifest",
]
