"""A writer a system: the keys of its file that say what a manifest means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

from composer3d.exporting.meaning import Meaning
from composer3d.importing import KeyTable, Verdict

__all__ = ["Writer", "WrittenFile", "simple_keys", "targets", "writer_of"]

_MODULES = MappingProxyType(
    {"deepspeed": "deepspeed_json", "accelerate": "accelerate_yaml", "torchtitan": "torchtitan_toml"}
)


@dataclass(kw_only=True)
class WrittenFile:
    """The keys of another system's file.

    Args:
        keys: By dotted key, in the order of the file.
        warnings: What the file leaves to its user.
        unsaid: Tables of a manifest of which the file says nothing, whatever its import has there by default.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    unsaid: set[str] = field(default_factory=set)

    def put(self, block: str, **keys: Any) -> None:
        """Add keys of a block, and those of the blocks in it; those that are None are left out."""
        prefix = f"{block}." if block else ""
        for key, value in keys.items():
            if isinstance(value, Mapping):
                self.put(f"{prefix}{key}", **value)
            elif value is not None:
                self.keys[f"{prefix}{key}"] = value

    def nested(self) -> dict[str, Any]:
        """Return nested tables."""
        result: dict[str, Any] = {}
        for key, value in self.keys.items():
            inner = result
            *parents, last = key.split(".")
            for part in parents:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return result


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Writer of a system's files.

    Args:
        write: Fills a file from what a manifest means.
        format: Returns the text of nested tables; what the importer reads.
        form: Of the text that is read back: `json` or `toml`.
        reread: Returns the text that is read back.
        notes: Why a key of the manifest, or a table, cannot be said there.
        verdicts: Verdicts of keys that cannot be said there, where that is not `missing`.
    """

    write: Callable[[Meaning, WrittenFile], None]
    format: Callable[[Mapping[str, Any]], str]
    reread: Callable[[Mapping[str, Any]], str]
    form: str
    notes: Mapping[str, str]
    verdicts: Mapping[str, Verdict]


def targets() -> tuple[str, ...]:
    """Return the names of the systems that manifests are exported to."""
    return tuple(_MODULES)


def writer_of(system: str) -> Writer:
    """Return a system's writer."""
    writer: Writer = import_module(f"composer3d.exporting.{_MODULES[system]}").WRITER
    return writer


def simple_keys(meaning: Meaning, table: KeyTable, file: WrittenFile) -> None:
    """Write the keys whose import is one value in one place, by the importer's table read backwards."""
    said = {table.entries[key].to for key in file.keys if key in table.entries}
    for key, entry in table.entries.items():
        if entry.to is None or entry.verdict is not Verdict.CARRIED or entry.to in said or key in file.keys:
            continue
        value = meaning.get(entry.to)
        if meaning.states(entry.to) and value is not None:
            file.keys[key] = value
            said.add(entry.to)
