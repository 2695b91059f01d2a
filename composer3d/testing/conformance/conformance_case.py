"""Manifests of a conformance suite: a small model beside which the plugin is switched on, and the same without it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer3d.errors import PluginError
from composer3d.mesh import AXES, Role
from composer3d.registry import Catalogue, PluginInfo, info_of
from composer3d.testing.plugin_options import installed_options, owners_of

__all__ = ["Conformance", "Written", "role_of"]

_BASE = """composer3d = 1
[run]
device = "cpu"
[model]
use = "composer3d.models:{model}"
args = {{ dim = 32, num_layers = {layers}, num_heads = 4, num_kv_heads = 4, ffn_dim = 64{experts} }}
[data]
use = "synthetic"
seq_len = 32
vocab_size = 128
[train]
steps = 2
microbatch = 1
global_batch = {batch}
"""
_MICROBATCHES = 2  # of a rank and step


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """A plugin under test, and what its author states of it.

    Args:
        plugin: Its class, importable by name.
        name: Of its table; default: the entry point's, or the class' name in lower case.
        options: Tables that are tried, one after the other; the first is tried against other plugins.
        beside: TOML of other tables that the plugin needs, or of another model or data.
        collectives: Number of collectives by (op, axis) that one step has more than without the plugin; None takes the
            docstring's *Collectives* paragraph: an op that it does not name is undeclared, and "none" means none.
        refused: Tables that `check` must refuse, each with a regular expression of the message.
        max_overhead: CPU time of a step over one without the plugin; None only reports it.
        matrix_minutes: Time for proofs beside other installed plugins; what is not reached is named.
        effect: Reads what a rank observed with and without the plugin, and says what the plugin did, for an effect that
            no observation below shows; None where it did nothing.
    """

    plugin: type
    name: str = ""
    options: Sequence[Mapping[str, Any]] = ({},)
    beside: str = ""
    collectives: Mapping[tuple[str, str], int] | None = None
    refused: Sequence[tuple[Mapping[str, Any], str]] = ()
    max_overhead: float | None = None
    matrix_minutes: float = 1.0
    effect: Callable[[Any, Any], str | None] | None = None

    def __post_init__(self) -> None:
        if info_of(self.plugin) is None:
            raise PluginError(f"{self.plugin.__name__} is no plugin", hint="decorate the class with @composer3d.plugin")

    @property
    def info(self) -> PluginInfo:
        """Declaration of the plugin's class."""
        info = info_of(self.plugin)
        assert info is not None, "validated"
        return info

    @property
    def table(self) -> str:
        """The plugin's table, `family.name`."""
        return f"{self.info.family}.{self.name or self.plugin.__name__.lower()}"


@dataclass(frozen=True, kw_only=True)
class Written:
    """Manifests of one case in a folder.

    Args:
        case: Of the plugin.
        folder: Of the manifests.
        degrees: Of axes above 1.
        owned: Axes among them that the plugin owns.
        default: Table of another plugin that shards the data axis; None where this one does, or none is needed.
    """

    case: Conformance
    folder: Path
    degrees: Mapping[str, int]
    owned: tuple[str, ...]
    default: str | None
    _number: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def of(cls, case: Conformance, folder: Path) -> Written:
        """Choose a layout: 2 ranks on the first data axis, or 2 on every axis that the plugin owns.

        An axis of experts is carved out of the data axis, which then has another plugin, and a mixture of experts is
        the model.
        """
        mesh = _stated_mesh(case.beside)
        owned = tuple(axis for axis in case.info.owns if axis not in mesh)
        data = next(axis.name for axis in AXES if axis.name.endswith("shard") and axis.role is Role.BATCH)
        default = None
        if all(map(_is_carved, case.info.owns)) and not mesh:
            default = owners_of(installed_options())[f"mesh.{data}"][0]
            mesh = {data: 2}
        degrees = {**mesh, **{axis: 2 for axis in _few(owned)}}
        return cls(case=case, folder=folder, degrees=degrees, owned=owned, default=default)

    @property
    def world_size(self) -> int:
        """Ranks of the layout."""
        return math.prod(degree for axis, degree in self.degrees.items() if not _is_carved(axis))

    def manifest(
        self, options: Mapping[str, Any] | None, *, more: str = "", degrees: Mapping[str, int] | None = None
    ) -> Path:
        """Write a manifest with the plugin, or with None without it.

        Args:
            options: The plugin's table.
            more: TOML of further tables.
            degrees: Of axes beside those of the layout.
        """
        found = {**self.degrees, **(degrees or {})}
        if options is None:
            found = {axis: degree for axis, degree in found.items() if axis not in self.owned}
        ranks = math.prod(degree for axis, degree in found.items() if _holds_samples(axis))
        self._number[0] += 1
        base = self.folder / f"base-{self._number[0]}.toml"
        kind = {"model": "llama", "experts": ""}
        if any(map(_is_carved, self.owned)):
            kind = {"model": "moe", "experts": ", num_experts = 4"}
        base.write_text(_BASE.format(layers=2 * found.get("pp", 1), batch=_MICROBATCHES * ranks, **kind))
        beside = self.folder / f"beside-{self._number[0]}.toml"
        beside.write_text(f'composer3d = 1\nextends = "{base.name}"\n{self.case.beside}\n')
        lines = [f'composer3d = 1\nextends = "{beside.name}"']
        lines += [f"mesh.{axis} = {degree}" for axis, degree in found.items()]
        lines += [f"{self.default} = {{}}"] if self.default else []
        lines += [more] if more else []
        lines += [self.table_of(options)] if options is not None else []
        path = self.folder / f"case-{self._number[0]}.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def table_of(self, options: Mapping[str, Any]) -> str:
        """Return the plugin's table as TOML."""
        from composer3d.manifest import inline

        cls = self.case.plugin
        stated = {} if _is_installed(self.case) else {"use": f"{cls.__module__}:{cls.__qualname__}"}
        pairs = (f"{json.dumps(key)} = {inline(value)}" for key, value in {**stated, **options}.items())
        return f"[{self.case.table}]\n" + "\n".join(pairs)

    def renamed(self, name: str) -> Written:
        """Return the same with another name of the plugin's table."""
        return replace(self, case=replace(self.case, name=name))


def _is_installed(case: Conformance) -> bool:
    catalogue = Catalogue.installed()
    name = case.table.partition(".")[2]
    return name in catalogue.names() and catalogue.load(name) is case.plugin


def _few(axes: Sequence[str]) -> Sequence[str]:
    """Return the axes that get two ranks: at most two of them, so that four ranks are enough."""
    return axes[:2]


def _stated_mesh(text: str) -> dict[str, int]:
    import tomli

    found = tomli.loads(text).get("mesh", {})
    return {axis: int(degree) for axis, degree in found.items() if isinstance(degree, int)}


def _holds_samples(axis: str) -> bool:
    """Return whether ranks of an axis hold other samples; of an axis that a plugin adds, they may."""
    return role_of(axis) in (Role.BATCH, None)


def _is_carved(axis: str) -> bool:
    """Return whether ranks of an axis are ranks of others, as of experts."""
    return role_of(axis) is Role.EXPERT


def role_of(axis: str) -> Role | None:
    """Return the role of an axis of composer3d's, or of an installed plugin's; None of another name."""
    added = [known for _, _, info in Catalogue.installed().classes() for known in info.axes]
    return next((known.role for known in (*AXES, *added) if known.name == axis), None)
