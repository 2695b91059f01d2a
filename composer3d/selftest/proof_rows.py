"""Rows of shipped covering sets as manifests for this machine: its device, and the plugins that it can import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from typing import Any

from composer3d.errors import PluginError
from composer3d.registry import FAMILIES, Catalogue

__all__ = ["ProofRow", "proof_rows"]

_SET = "covering_set.json"  # in a package of plugins, whose manifests it has


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """A manifest that `verify` proves.

    Args:
        manifest: TOML.
        ranks: Of its world.
        seconds: That it took on two cores of a CPU, by itself.
        pairs: Share of all pairs of options that stand together in it or in one before it.
        plugins: Number of them.
        absent: Plugins of the row that this machine cannot import, for want of an extra.
    """

    manifest: str
    ranks: int
    seconds: float
    pairs: float
    plugins: int
    absent: tuple[str, ...]


def proof_rows(*, device: str, max_ranks: int) -> list[ProofRow]:
    """Return the rows that packages of plugins ship, in the order in which they cover most.

    Args:
        device: `cpu` or `cuda`.
        max_ranks: Rows of more ranks are left out.
    """
    catalogue = Catalogue.installed()
    entries = [entry for package in catalogue.packages() for entry in _shipped(package)]
    missing = _missing(catalogue)
    return [_row(entry, device, missing) for entry in entries if entry["ranks"] <= max_ranks]


def _shipped(package: str) -> list[Any]:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    file = resources.files(package).joinpath(_SET)
    rows: list[Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return rows


def _missing(catalogue: Catalogue) -> frozenset[str]:
    found = {name for name in catalogue.names() if catalogue.lacks(name)}
    for name in catalogue.names():
        try:
            catalogue.load(name)
        except PluginError:
            found.add(name)
    return frozenset(found)


def _row(entry: Mapping[str, Any], device: str, missing: frozenset[str]) -> ProofRow:
    import tomli

    from composer3d.manifest import dump

    tables: dict[str, Any] = tomli.loads(entry["manifest"])
    tables["run"] = {**tables.get("run", {}), "device": device}
    families = [tables[family] for family in FAMILIES if family in tables]
    absent = tuple(sorted({name for family in families for name in family if name in missing}))
    for family in families:
        for name in absent:
            family.pop(name, None)
    return ProofRow(
        manifest=dump(tables),
        ranks=entry["ranks"],
        seconds=entry["seconds"],
        pairs=entry["pairs"],
        plugins=sum(map(len, families)),
        absent=absent,
    )
