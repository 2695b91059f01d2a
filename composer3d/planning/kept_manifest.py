"""Traced manifests on disk, found by what stands in a manifest: neither torch nor the model is imported for them.

An entry is found by the manifest's tables, what was asked, the files and folders that the manifest names, what is
installed, and the environment of torch and of Hugging Face; and it is used where the code has the state that the entry
notes, of composer3d, of plugins, and of the model's package. Nothing is kept where code runs that is not installed, as
a model in a file or a package beside the manifest: it may read what nobody knows of. Its traces are kept by another
key, for which the model is built (`trace_cache`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.planning.traced_manifest import TracedManifest
from composer3d.planning.tracing.code_state import (
    folder_state,
    installed_state,
    library_environment,
    own_modules,
    package_folders,
    plugin_packages,
    state_of,
)
from composer3d.planning.tracing.kept_entries import VARIABLE, Entries

if TYPE_CHECKING:
    from composer3d.manifest import Document

__all__ = ["kept_manifest"]

_FORMAT = 1
# Of NVIDIA's and of AMD's driver: a machine that gets a device runs `device = "auto"` there.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_MOST_FILES = 10_000


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A traced manifest, with the folders of code that made it and their states."""

    code: tuple[tuple[str, str], ...]
    traced: TracedManifest


def kept_manifest(
    document: Document, asked: Mapping[str, Any], trace: Callable[[], tuple[TracedManifest, frozenset[str]]]
) -> TracedManifest:
    """Return a traced manifest, from disk where it is, else made and kept there.

    Args:
        document: The manifest, merged.
        asked: Of the trace: world size, ranks and the like.
        trace: Makes it; returns it with the names of the modules of its model, loss and plugins.
    """
    entries: Entries[_Entry] = Entries(_Entry)
    key = _key(document, asked) if entries.are_kept else None
    found = None if key is None else entries.read(key)
    if found is not None and all(folder_state(folder, suffix=".py") == state for folder, state in found.code):
        return found.traced
    traced, modules = trace()
    folders = package_folders({"composer3d", *modules})
    if key is not None and next(own_modules(package_folders(plugin_packages())), None) is None:
        code = [(folder, folder_state(folder, suffix=".py") or "") for folder in folders]
        entries.write(key, _Entry(code=tuple(code), traced=traced))
    return traced


def _key(document: Document, asked: Mapping[str, Any]) -> str | None:
    """Return the digest of all but code that a trace depends on; None where that is too many files."""
    named = [*_named_files(document)]
    if None in named:
        return None
    found = {
        "format": _FORMAT,
        "python": sys.version,
        "path": sys.path,
        "installed": installed_state(),
        "environment": library_environment(but=VARIABLE),
        "drivers": [path for path in _DRIVERS if os.path.exists(path)],
        "tables": document.tables,
        "folder": str(document.folder),
        "asked": dict(asked),
        "named": named,
        "output": [*_output(document)],
    }
    return hashlib.sha256(json.dumps(found, default=str).encode()).hexdigest()


def _named_files(document: Document) -> Iterator[str | None]:
    """Yield the state of what a manifest's strings name as files or folders; None for a folder of very many."""
    tables = {**document.tables, "run": {}}
    for text in sorted(set(_strings(tables))):
        paths = (document.folder / text, Path(text)) if text and "\0" not in text and len(text) < 1024 else ()
        for path in dict.fromkeys(paths):
            yield folder_state(path, most=_MOST_FILES) if path.is_dir() else state_of(path)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _output(document: Document) -> Iterator[str]:
    """Yield what stands at the places of the run's files, which is checked: a file where a folder would be."""
    for path in (document.get(("run", "output")), f"runs/{document.stem}", "runs"):
        place = document.folder / str(path)
        yield f"{place} {place.is_dir()} {place.exists()}"
