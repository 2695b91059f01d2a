"""Typing of a document: every table validated, every plugin found, every mistake collected."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from composer3d.errors import ComposerError, ManifestError, PluginError, Problem, ReferenceFailure, did_you_mean
from composer3d.manifest.descriptions import fields
from composer3d.manifest.document import Document, read
from composer3d.manifest.habits import explained
from composer3d.manifest.references import resolve_reference
from composer3d.manifest.secret import remember_secrets
from composer3d.manifest.tables import CORE_TABLES, MeshTable, ModelTable, TrainTable, mesh_table, validate
from composer3d.manifest.toml_writer import dotted, inline
from composer3d.manifest.validation import secret_paths
from composer3d.registry import FAMILIES, Catalogue, Registered, info_of

_MOST_OWNERS = 3  # tables that a key is looked for in; what more have is a word of many meanings

__all__ = ["InspectedManifest", "Manifest", "inspect_manifest", "load_manifest", "type_manifest"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """A manifest, typed.

    Args:
        document: Where everything was written.
        tables: Instances of the table classes by name; a table that the manifest leaves out has its defaults.
        plugins: Instances of the plugins whose tables the manifest has.
    """

    document: Document
    tables: Mapping[str, Any]
    plugins: tuple[Registered, ...]

    @property
    def mesh(self) -> MeshTable:
        """`[mesh]`."""
        table: MeshTable = self.tables["mesh"]
        return table

    @property
    def model(self) -> ModelTable:
        """`[model]`."""
        table: ModelTable = self.tables["model"]
        return table

    @property
    def train(self) -> TrainTable:
        """`[train]`."""
        table: TrainTable = self.tables["train"]
        return table

    @property
    def output(self) -> Path:
        """The run's folder: `[run] output`, else `runs/` and the manifest's name."""
        return Path(getattr(self.tables.get("run"), "output", None) or f"runs/{self.document.stem}")

    @property
    def degrees(self) -> dict[str, int | None]:
        """The degrees that `[mesh]` states, by axis; of several layouts those of the largest world."""
        return self.degrees_on(None)

    def degrees_on(self, world_size: int | None) -> dict[str, int | None]:
        """Return the degrees that `[mesh]` states for a world.

        Args:
            world_size: Its ranks; None takes the largest world that `[mesh] layouts` has an entry for.
        """
        layouts = self.mesh.layouts
        size = max(map(int, layouts), default=0) if world_size is None else world_size
        return self.mesh.degrees | layouts.get(str(size), {})


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
        tables: Tables beyond the core's, or with more keys than the core's.
        catalogue: Catalogue of plugins; default: the installed ones.

    Raises:
        ManifestError: With every mistake of the file.
    """
    return type_manifest(read(source, overrides), tables=tables, catalogue=catalogue)


def type_manifest(
    document: Document, *, tables: Mapping[str, type] | None = None, catalogue: Catalogue | None = None
) -> Manifest:
    """Type a document that was read before; see `load_manifest`."""
    inspected = inspect_manifest(document, tables=tables, catalogue=catalogue)
    if inspected.problems:
        raise ManifestError(inspected.problems)
    return inspected.manifest


@dataclass(frozen=True, kw_only=True, eq=False)
class InspectedManifest:
    """A manifest as far as it can be typed, so that what does not depend on its mistakes can still be checked.

    Args:
        manifest: Tables and plugins without their wrong keys; one that cannot be without them is missing.
        problems: Every mistake found.
        unresolved: Plugin tables that lead to no plugin, by family and name.
    """

    manifest: Manifest
    problems: tuple[Problem, ...]
    unresolved: tuple[tuple[str, str], ...]


def inspect_manifest(
    document: Document, *, tables: Mapping[str, type] | None = None, catalogue: Catalogue | None = None
) -> InspectedManifest:
    """Type a document and collect its mistakes; see `load_manifest`."""
    classes: dict[str, type] = {**CORE_TABLES, **(tables or {})}
    catalogue = catalogue or Catalogue.installed()
    problems: list[Problem] = [*document.unusable, *_unknown_tables(document, classes)]
    # A table with a misspelt name is not also reported for missing keys.
    meant = {near for problem in problems for near in get_close_matches(str(problem.table), classes, n=1, cutoff=0.6)}
    plugins = _plugins(document, catalogue, problems)
    try:
        if classes["mesh"] is MeshTable:
            classes["mesh"] = mesh_table([axis.name for plugin in plugins for axis in plugin.info.axes])
    except ComposerError as error:
        problems.append(document.problem(("mesh",), str(error), whole_table=True))
    instances: dict[str, Any] = {}
    for name, cls in classes.items():
        instance, found = _instance(document, (name,), cls, document.get((name,), {}))
        if name in document.tables or name not in meant:
            problems += found
        if instance is None and name in CORE_TABLES:
            instance, _ = _instance(document, (name,), CORE_TABLES[name], document.get((name,), {}))
            instance = instance or CORE_TABLES[name]()
        if instance is not None:
            instances[name] = instance
    known = {(plugin.info.family, plugin.name) for plugin in plugins}
    typed = {(name,): cls for name, cls in classes.items()} | {
        (plugin.info.family, plugin.name): type(plugin.instance) for plugin in plugins
    }
    secrets = frozenset(
        found for path, cls in typed.items() for found in secret_paths(cls, document.get(path, {}), path)
    )
    document = replace(document, secrets=secrets)
    remember_secrets(document.tables, secrets)
    problems = [
        explained(_at_its_table(problem, classes), value=_value_at(document, problem), tables=(*classes, *FAMILIES))
        for problem in problems
    ]
    return InspectedManifest(
        manifest=Manifest(document=document, tables=instances, plugins=tuple(plugins)),
        problems=tuple(problems),
        unresolved=tuple(
            (family, name)
            for family in document.tables
            if family not in classes and isinstance(document.get((family,)), Mapping)
            for name in document.get((family,))
            if (family, name) not in known and isinstance(document.get((family, name)), Mapping)
        ),
    )


def _instance(document: Document, path: tuple[str, ...], cls: type, value: Any) -> tuple[Any, list[Problem]]:
    """Make an instance of a table, without the keys that are wrong if there are such."""
    instance, problems = validate(document, path, cls, value)
    if not problems or not isinstance(value, Mapping):
        return instance, problems
    wrong = {_key_of(problem, path) for problem in problems}
    return validate(document, path, cls, {key: item for key, item in value.items() if key not in wrong})[0], problems


def _at_its_table(problem: Problem, classes: Mapping[str, type]) -> Problem:
    """Name the tables that have an unknown key, where none of its own is near it."""
    if not problem.message.startswith("unknown ") or (problem.hint or "").startswith("did you mean"):
        return problem
    key = problem.key or (problem.table or "").strip('"')
    owners = [name for name, cls in classes.items() if key in fields(cls) and name != problem.table]
    if not key or not 0 < len(owners) <= _MOST_OWNERS:
        return problem
    return replace(problem, hint=f"write {' or '.join(f'{name}.{key}' for name in owners)}")


def _value_at(document: Document, problem: Problem) -> Any:
    table = tuple(problem.table.split(".")) if problem.table else ()
    return document.get((*table, problem.key)) if problem.key is not None else None


def _key_of(problem: Problem, path: tuple[str, ...]) -> str | None:
    """Return the key of the table at `path` that has a problem."""
    inside = (problem.table or "").removeprefix(dotted(path)).lstrip(".")
    return re.split(r"[.\[]", inside)[0] if inside else problem.key


def _unknown_tables(document: Document, classes: Mapping[str, type]) -> list[Problem]:
    known = [*classes, *FAMILIES]
    return [
        document.problem((name,), f"unknown table {inline(name)}", hint=did_you_mean(name, known), whole_table=True)
        for name in document.tables
        if name not in known
    ]


def _plugins(document: Document, catalogue: Catalogue, problems: list[Problem]) -> list[Registered]:
    result: list[Registered] = []
    for family in FAMILIES:
        tables = document.get((family,), {})
        if not isinstance(tables, Mapping):
            names = [name for name in catalogue.names() if f".{family}." in catalogue.origin(name)]
            hint = f"NAME is one of: {', '.join(names)}" if names else None
            message = f"{family} must be a table of plugins, [{family}.NAME]"
            problems.append(document.problem((family,), message, hint=hint))
            continue
        for name, table in tables.items():
            plugin = _plugin(document, catalogue, family, name, table, problems)
            if plugin is not None:
                result.append(plugin)
    return result


def _plugin(
    document: Document, catalogue: Catalogue, family: str, name: str, table: Any, problems: list[Problem]
) -> Registered | None:
    path = (family, name)
    if not isinstance(table, Mapping):
        is_option = name not in catalogue.names() and catalogue.option_hint(name)
        written = is_option or f"write [{family}.{name}]"
        problems.append(document.problem(path, f'"{name}" must be a table', hint=written))
        return None
    options = dict(table)
    reference = options.pop("use", None)
    try:
        cls = _from_reference(reference, document) if reference is not None else catalogue.load(name)
    except PluginError as error:
        is_unknown = reference is None and name not in catalogue.names()
        hint = (catalogue.owner_hint(name) or catalogue.option_hint(name)) if is_unknown else None
        problems.append(document.problem(path, error.message, hint=hint or error.hint, whole_table=True))
        return None
    except ReferenceFailure as error:
        problems.append(document.problem((*path, "use"), error.message, hint=error.hint))
        return None
    info = info_of(cls)
    assert info is not None, "both ways check it"
    if info.family != family:
        message = f'"{name}" is a {info.family} plugin, not a {family} one'
        hint = f"write [{info.family}.{name}]"
        problems.append(document.problem(path, message, hint=hint, whole_table=True))
        return None
    instance, found = _instance(document, path, cls, options)
    problems += found
    if instance is None:
        return None
    place = document.place(path)
    return Registered(name, instance, f"{place.file}:{place.line}" if place.line else place.file)


def _from_reference(reference: Any, document: Document) -> type:
    if not isinstance(reference, str):
        raise PluginError(f'use must be a string "module:Class", not {reference!r}')
    cls = cast(type, resolve_reference(reference, document.folder))
    if info_of(cls) is None:
        raise PluginError(f'"{reference}" is not a plugin', hint="decorate the class with @composer3d.plugin")
    return cls
