"""The meaning of a manifest: the value of every key, stated or not, so that two manifests can be compared."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer3d.errors import ComposerError
from composer3d.importing import path_of
from composer3d.manifest import CORE_TABLES, Document, Manifest, MeshTable, fields, type_manifest
from composer3d.registry import FAMILIES
from composer3d.runner import TABLES, optimizer_class

__all__ = ["Meaning", "meaning_of"]

_SCALE = {"initial_scale": 65536.0, "growth_interval": 2000, "hysteresis": 1, "min_scale": 2.0**-24}
_MODEL_AXES = ("pp", "tp", "cp")  # whose ranks do not read other samples


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The values of a manifest.

    Args:
        values: By dotted key, defaults too, of every table of a run and of the plugins that it has.
        stated: Keys that it states, with their lines; a plugin's table without keys is one.
        plugins: Tables of plugins.
        degree: Data-parallel ranks; None where neither the manifest nor the user says how many.
        world: Ranks; None likewise.
        is_run: Whether it is one of `composer3d run`.
        manifest: Typed.
    """

    values: Mapping[str, Any]
    stated: Mapping[str, int | None]
    plugins: frozenset[str]
    degree: int | None
    world: int | None
    is_run: bool
    manifest: Manifest

    def get(self, to: str, default: Any = None) -> Any:
        """Return the value of a key, whose table may be a word of the importer's (`@sharded.zero`); else a default."""
        value = self.values.get(path_of(to))
        return default if value is None else value

    def has(self, word: str) -> bool:
        """Return whether a plugin is there."""
        return path_of(word) in self.plugins

    def states(self, to: str) -> bool:
        """Return whether a key, or one below it, is stated."""
        path = path_of(to)
        return any(key == path or key.startswith(f"{path}.") for key in self.stated)

    def axis(self, name: str) -> int | None:
        """Return the degree of an axis; None where it is not known."""
        degree: int | None = self.values.get(f"mesh.{name}")
        return degree


def meaning_of(document: Document, *, world: int | None) -> Meaning:
    """Return what a manifest means.

    Args:
        document: Read.
        world: Ranks; default: what the degrees multiply to, where all are stated.

    Raises:
        ManifestError: With every mistake of the manifest.
    """
    is_run = not _is_of_a_loop(document)
    tables: dict[str, type] = dict(TABLES) if is_run else {}
    manifest = type_manifest(document, tables=tables)
    values: dict[str, Any] = {}
    for name, instance in manifest.tables.items():
        values |= {f"{name}.{key}": _plain(getattr(instance, key, None)) for key in fields(type(instance))}
    plugins = frozenset(f"{plugin.info.family}.{plugin.name}" for plugin in manifest.plugins)
    for plugin in manifest.plugins:
        path = f"{plugin.info.family}.{plugin.name}"
        held = fields(type(plugin.instance))
        values |= {f"{path}.{key}": _plain(getattr(plugin.instance, key, None)) for key in held}
    _resolve_scale(values)
    world = _resolve_degrees(values, plugins, world)
    if is_run:
        _resolve_optimizer(values, manifest)
    degree = _data_degree(values, world)
    _resolve_batch(values, manifest, degree)
    return Meaning(
        values=values,
        stated=_stated(document),
        plugins=plugins,
        degree=degree,
        world=world,
        is_run=is_run,
        manifest=manifest,
    )


def _is_of_a_loop(document: Document) -> bool:
    """Return whether a manifest is one for `compose`: nothing in it is used by a run alone."""
    known = {name: set(fields(cls)) for name, cls in CORE_TABLES.items() if cls is not MeshTable}
    for name, keys in document.tables.items():
        if name in FAMILIES or name == "mesh":
            continue
        if name not in known or not isinstance(keys, Mapping) or set(keys) - known[name]:
            return False
    return True


def _plain(value: Any) -> Any:
    """Return a value as TOML has it."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    held = fields(type(value))
    if held:
        items = {key: _plain(getattr(value, key, None)) for key in held}
        return {key: item for key, item in items.items() if item not in (None, {}, [])}
    return value


def _stated(document: Document) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, keys in document.tables.items():
        depth = 2 if name in FAMILIES else 1
        _walk(document, (name,), keys, depth, found)
    return found


def _walk(document: Document, path: tuple[str, ...], value: Any, depth: int, found: dict[str, int | None]) -> None:
    if depth and isinstance(value, Mapping) and value:
        for key, item in value.items():
            _walk(document, (*path, key), item, depth - 1, found)
        return
    found[".".join(path)] = document.place(path).line


def _resolve_degrees(values: dict[str, Any], plugins: frozenset[str], world: int | None) -> int | None:
    """Fill in degrees that are left open, and return the world; None where it is not known."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    degrees = {axis: values.get(f"mesh.{axis}") for axis in axes}
    rest = next((axis for axis, degree in degrees.items() if degree == -1), None)
    if rest is None:
        sharded, replicated = path_of("@sharded") in plugins, path_of("@replicated") in plugins
        preferred = "dp_shard" if sharded else "dp_replicate" if replicated else None
        rest = preferred if preferred is not None and degrees[preferred] is None else None
    known = math.prod(degree for axis, degree in degrees.items() if axis != rest and degree is not None)
    for axis, degree in degrees.items():
        open_degree = None if world is None or world % known else world // known
        values[f"mesh.{axis}"] = open_degree if axis == rest else 1 if degree is None else degree
    values["mesh.ep"] = values.get("mesh.ep") or 1
    return world if rest is not None else known


def _resolve_scale(values: dict[str, Any]) -> None:
    """Fill in the loss scale of float16 that is in use where the manifest is silent."""
    is_dynamic = values.get(path_of("@mixed.static_scale")) is None
    if values.get(path_of("@mixed.param_dtype")) == "float16" and is_dynamic:
        for key, default in _SCALE.items():
            path = path_of(f"@mixed.{key}")
            values[path] = default if values.get(path) is None else values[path]


def _data_degree(values: Mapping[str, Any], world: int | None) -> int | None:
    return None if world is None else world // math.prod(values[f"mesh.{axis}"] for axis in _MODEL_AXES)


def _resolve_batch(values: dict[str, Any], manifest: Manifest, degree: int | None) -> None:
    """Fill in the batch of a step: of a known number of ranks its size and its micro-batches are one thing."""
    train = manifest.train
    if degree is not None and train.microbatch is not None:
        values["train.global_batch"] = train.batch_over(degree)
        values["train.accumulate"] = train.num_microbatches(degree)


def _resolve_optimizer(values: dict[str, Any], manifest: Manifest) -> None:
    """Fill in what the optimizer's class, or the run, has where the manifest is silent."""
    table = manifest.tables["optimizer"]
    try:
        cls, arguments = optimizer_class(table, manifest.document.folder)
    except ComposerError:  # a class of the user's that cannot be imported here
        return
    known = inspect.signature(cls).parameters
    for key in ("weight_decay", "betas", "eps", "momentum", "nesterov"):
        if key in known and values.get(f"optimizer.{key}") is None:
            values[f"optimizer.{key}"] = _plain(arguments.get(key, known[key].default))
    if not values["optimizer.weight_decay"] and not any("weight_decay" in g for g in values["optimizer.groups"]):
        values["optimizer.no_decay"] = None  # nothing is decayed
