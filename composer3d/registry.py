"""Plugins: the decorator that makes a class one, what its class declares, and the catalogue of those installed."""

from __future__ import annotations

import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass

from composer3d.errors import PluginError, describe_error, did_you_mean, is_interrupt
from composer3d.interfaces import LayoutOffer, LayoutTraits
from composer3d.mesh import Axis

__all__ = [
    "FAMILIES",
    "GROUP",
    "TABLE_CONFIG",
    "Catalogue",
    "Claim",
    "Claims",
    "PluginInfo",
    "Registered",
    "info_of",
    "offering",
    "options_of",
    "plugin",
]

FAMILIES = ("sharding", "scheduling", "precision", "communication", "profiling")
GROUP = "composer3d"  # of entry points, and pluggy's project
# Of every typed table, the manifest's own and those of plugins.
TABLE_CONFIG = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
C = TypeVar("C", bound=type)
# Effects of a plugin on a step; only one plugin may have each of those in `_OF_ONE`.
Claim = Literal[
    "optimizer",
    "grad_scaler",
    "gradients",
    "moved_gradients",
    "stepped_units",
    "first_step",
    "depth",
    "samples",
    "all_gather",
    "reduce_scatter",
    "sequence_projections",
]
_OF_ONE = {
    "optimizer": "make the optimizer",
    "grad_scaler": "scale the loss",
    "all_gather": "replace the all-gather",
    "reduce_scatter": "replace the reduce-scatter of gradients",
    "sequence_projections": "replace projections of a sharded sequence",
}


@dataclass(frozen=True, kw_only=True)
class PluginInfo:
    """Declaration of a plugin's class, known to `check` before an instance exists.

    Args:
        family: The table it stands in.
        owns: Axes it owns; of several, the first takes the ranks that `[mesh]` leaves open, where it is a batch axis.
        axes: Axes it adds to the mesh.
        devices: Device types it works on; None is any.
        extra: The extra of its distribution that brings what it imports when it acts.
        offer: Layouts that it can make.
        provides: Services that commands look for, with the keys of the table that they write for it. The one who
            provides `nonfinite_modules` writes the modules whose outputs were not finite to `NAME/rank-R.jsonl`; of
            `findings` the last line of each rank's is what `doctor` adds, `{"step": n, "finding": text}`; of `traces`
            spans in OTLP's JSON lines are in `traces/rank-R.jsonl`; of `memory_snapshots` what fills the memory when it
            runs out is in `memory/`.
    """

    family: str
    owns: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    devices: tuple[str, ...] | None = None
    extra: str | None = None
    offer: LayoutOffer | None = None
    provides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def plugin(
    *,
    family: str,
    owns: Sequence[str] = (),
    axes: Sequence[Axis] = (),
    devices: Sequence[str] | None = None,
    extra: str | None = None,
    offer: LayoutOffer | None = None,
    provides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[C], C]:
    """Make a class a plugin: a frozen, keyword-only, strictly typed dataclass whose fields are its table.

    See `PluginInfo` for the arguments.

    >>> @plugin(family="profiling")
    ... class Nothing:
    ...     every: int = 1
    >>> Nothing(every=2).every
    2
    """
    if family not in FAMILIES:
        raise PluginError(f'"{family}" is not a family', hint=did_you_mean(family, FAMILIES))
    info = PluginInfo(
        family=family,
        owns=tuple(owns),
        axes=tuple(axes),
        devices=None if devices is None else tuple(devices),
        extra=extra,
        offer=offer,
        provides=provides or {},
    )

    def decorate(cls: C) -> C:
        result: Any = pydantic_dataclass(frozen=True, kw_only=True, eq=False, config=TABLE_CONFIG)(cls)
        result.__composer3d_plugin__ = info
        return typing.cast(C, result)

    return decorate


def info_of(cls: Any) -> PluginInfo | None:
    """Return what the class declares, or None if it is no plugin."""
    return getattr(cls, "__composer3d_plugin__", None)


class Catalogue:
    """The plugins that are installed, by entry point; each is imported only when a manifest names it."""

    def __init__(self, points: Sequence[EntryPoint]) -> None:
        self._points: dict[str, list[EntryPoint]] = {}
        for point in points:
            same = self._points.setdefault(point.name, [])
            if all(other.value != point.value for other in same):
                same.append(point)

    @classmethod
    def installed(cls) -> Catalogue:
        """Read the metadata of all installed distributions; imports no plugin.

        They are read once for the folders that Python imports from; forked ranks find what their parent has read.
        """
        return cls(_entry_points(tuple((path, _changed(path)) for path in sys.path)))

    def names(self) -> tuple[str, ...]:
        """Return all plugin names, sorted."""
        return tuple(sorted(self._points))

    def packages(self) -> tuple[str, ...]:
        """Return the top-level packages and modules that plugins are in, sorted."""
        points = [point for same in self._points.values() for point in same]
        return tuple(sorted({point.module.partition(".")[0] for point in points}))

    def owner_hint(self, axis: str) -> str | None:
        """Return which tables to write for an axis; None if no plugin that can be imported owns it."""
        found = []
        for name in self.names():
            try:
                info = info_of(self.load(name))
            except PluginError:
                continue
            if info is not None and axis in info.owns:
                found.append(f"[{info.family}.{name}]")
        return f"write {' or '.join(found)}, which owns {axis}" if found else None

    def offering(self, trait: str, value: Any) -> str | None:
        """Return the tables to write for a trait of a layout, with their keys; None if no installed plugin offers it.

        Args:
            trait: Of `LayoutTraits`.
            value: Of the trait.
        """
        return offering(((name, info) for name, _, info in self.classes()), trait, value)

    def providing(self, service: str) -> str | None:
        """Return the tables to write for a service, with their keys; None if no installed plugin provides it."""
        found = ((name, info) for name, _, info in self.classes() if service in info.provides)
        return " or ".join(_stated(name, info, info.provides[service]) for name, info in found) or None

    def option_hint(self, option: str) -> str | None:
        """Return which table a name that no plugin has is a key of; None of more than one, or none, of them."""
        found = [
            f"[{info.family}.{name}]"
            for name, cls, info in self.classes()
            if option in options_of(cls).get("properties", ())
        ]
        return f"it is a key of {found[0]}; write {option} there" if len(found) == 1 else None

    def origin(self, name: str) -> str:
        """Return the distribution and object behind a name, for people."""
        return " and ".join(
            f"{point.value.partition(' ')[0]} ({point.dist.name} {point.dist.version})" if point.dist else point.value
            for point in self._points[name]
        )

    def lacks(self, name: str) -> tuple[str, ...]:
        """Return the distributions that the extra of a plugin's own name asks for, and that are not installed."""
        point = self._points[name][0]
        named = re.compile(rf"extra\s*==\s*['\"]{re.escape(name)}['\"]")
        stated = (text.partition(";") for text in (point.dist and point.dist.requires) or ())
        wanted = (re.match(r"[\w.-]+", text) for text, _, marker in stated if named.search(marker))
        return tuple(found[0] for found in wanted if found and not _is_installed(found[0]))

    def load(self, name: str) -> type:
        """Import the plugin.

        Raises:
            PluginError: No such plugin, two of that name, an extra that is not installed, or an import that fails.
        """
        points = self._points.get(name)
        if not points:
            raise PluginError(f'no plugin "{name}" is installed', hint=did_you_mean(name, self.names()))
        if len(points) > 1:
            raise PluginError(
                f'two distributions have a plugin "{name}": {self.origin(name)}',
                hint='write use = "module:Class" in its table',
            )
        point = points[0]
        try:
            cls = point.load()
        except ImportError as error:
            raise PluginError(f'the plugin "{name}" cannot be imported: {error}', hint=_install_hint(point)) from error
        except AttributeError as error:
            raise PluginError(f'the plugin "{name}" cannot be imported: {error}') from error
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise PluginError(f'the plugin "{name}" cannot be imported: {describe_error(error)}') from error
        if info_of(cls) is None:
            raise PluginError(f'"{point.value}" is not a plugin', hint="decorate the class with @composer3d.plugin")
        return typing.cast(type, cls)

    def classes(self) -> Iterator[tuple[str, type, PluginInfo]]:
        """Import every plugin and yield it with its name; one that cannot be imported here is left out."""
        for name in self.names():
            try:
                cls = self.load(name)
            except PluginError:  # an extra that is not installed; `composer3d plugins` says so
                continue
            info = info_of(cls)
            if info is not None:
                yield name, cls, info


def offering(plugins: Iterable[tuple[str, PluginInfo]], trait: str, value: Any) -> str | None:
    """Return which of these plugins offer a trait of a layout; see `Catalogue.offering`."""
    wanted = LayoutTraits(**{trait: value})
    offers = ((name, info, info.offer) for name, info in plugins if info.offer is not None)
    found = [(name, info, offer) for name, info, offer in offers if value in offer.choices.get(trait, ())]
    return " or ".join(_stated(name, info, offer.table(wanted, {}) or {}) for name, info, offer in found) or None


def _stated(name: str, info: PluginInfo, table: Mapping[str, Any]) -> str:
    """Return a plugin's table with its keys, for people."""
    keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    return f"[{info.family}.{name}] {keys}".rstrip()


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _install_hint(point: EntryPoint) -> str | None:
    if not point.extras or point.dist is None:
        return None
    return f'pip install "{point.dist.name}[{",".join(point.extras)}]"'


def options_of(cls: type) -> dict[str, Any]:
    """Return the JSON schema of a plugin's table."""
    return TypeAdapter(cls).json_schema()


@dataclass(frozen=True)
class Registered:
    """A plugin of this run, with the place of its table for messages."""

    name: str
    instance: Any
    place: str

    @property
    def info(self) -> PluginInfo:
        """Declaration of its class."""
        return typing.cast(PluginInfo, info_of(type(self.instance)))

    def __str__(self) -> str:
        return f"[{self.info.family}.{self.name}] ({self.place})"


class Claims:
    """The effects that the plugins of one run have on its steps; see `RunContext.claim`."""

    def __init__(self) -> None:
        self._by_effect: dict[Claim, list[tuple[Registered, bool]]] = {}

    def add(self, what: Claim, by: Registered, *, each_alone: bool) -> None:
        """Add an effect.

        Raises:
            PluginError: Another plugin does what only one may.
        """
        claims = self._by_effect.setdefault(what, [])
        if claims and what in _OF_ONE and claims[0][0] is not by:
            raise PluginError(f"{claims[0][0]} and {by} both {_OF_ONE[what]}, and a run has one; remove one of them")
        claims.append((by, each_alone))

    def names(self, what: Claim, *, each_alone: bool) -> list[str]:
        """Return the names of the plugins that have an effect, as `RunContext.claimants` does."""
        return [str(plugin) for plugin, alone in self._by_effect.get(what, ()) if not (each_alone and alone)]


@lru_cache(maxsize=1)
def _entry_points(_folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Read the entry points of plugins: 10 ms, which every rank would spend."""
    return tuple(entry_points(group=GROUP))


def _changed(folder: str) -> int:
    """Return when distributions were last put into a folder or taken out of it, as `importlib.metadata` looks at it."""
    try:
        return Path(folder or ".").stat().st_mtime_ns
    except OSError:
        return 0
