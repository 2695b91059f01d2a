"""Options of the installed plugins, third-party ones included, and degrees of the axes, for tests of combinations.

A combination is a row: a value for every key. Values are text as TOML has it, so that a row is a manifest, can be
compared, and is serialised as JSON. A plugin is `off` or `on`, and its options `off` with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from composer3d.mesh import AXES, Axis, Role
from composer3d.registry import Catalogue, info_of, options_of

__all__ = [
    "DEFAULT",
    "OFF",
    "ON",
    "Options",
    "Row",
    "installed_options",
    "multiplied_axes",
    "owners_of",
    "plugin_of",
    "tables_of",
]

OFF, ON, DEFAULT = "off", "on", "default"
Options: TypeAlias = Mapping[str, tuple[str, ...]]
Row: TypeAlias = Mapping[str, str]
_DEGREES = ("1", "2", "4")


def installed_options(
    catalogue: Catalogue | None = None, *, used: Mapping[str, type] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the values of every option of the installed plugins, and degrees of every axis that one of them owns.

    Read from a plugin's fields: the values of a Literal, both values of a bool, the bounds of a number; or what the
    field names itself, as `Field(default=0, ge=0, examples=[1])`. An empty list of examples leaves a field out. Every
    field has its default too, which is its first value.

    Args:
        catalogue: Default: all that is installed; plugins that cannot be imported here are left out.
        used: Further plugins by name, as a manifest's `use` brings them.

    Returns:
        `mesh.AXIS`, then `FAMILY.PLUGIN` and `FAMILY.PLUGIN.FIELD`; of each key the neutral value first.

    >>> options = installed_options(used={})
    >>> options["sharding.fsdp2"], options["sharding.fsdp2.zero"], options["mesh.tp"]
    (('off', 'on'), ('off', 'default', '1', '2'), ('1', '2', '4'))
    """
    classes = {**_importable(Catalogue.installed() if catalogue is None else catalogue), **(used or {})}
    options: dict[str, tuple[str, ...]] = {f"mesh.{axis.name}": _DEGREES for axis in _axes(classes)}
    for name, cls in sorted(classes.items()):
        info = info_of(cls)
        assert info is not None, "plugins have one"
        options[f"{info.family}.{name}"] = (OFF, ON)
        for field, schema in options_of(cls).get("properties", {}).items():
            values = _values(schema)
            if values:
                options[f"{info.family}.{name}.{field}"] = (OFF, DEFAULT, *values)
    return options


def owners_of(options: Options, catalogue: Catalogue | None = None) -> dict[str, tuple[str, ...]]:
    """Return, for every axis of the options, the keys of the plugins that own it."""
    classes = _importable(Catalogue.installed() if catalogue is None else catalogue)
    result: dict[str, tuple[str, ...]] = {}
    for name, cls in classes.items():
        info = info_of(cls)
        assert info is not None, "plugins have one"
        for axis in info.owns:
            result[f"mesh.{axis}"] = (*result.get(f"mesh.{axis}", ()), f"{info.family}.{name}")
    return {axis: keys for axis, keys in result.items() if axis in options}


def multiplied_axes(options: Options, catalogue: Catalogue | None = None) -> tuple[str, ...]:
    """Return the axes of the options whose degrees multiply to the world: no carved ones, and no groups of ranks."""
    classes = _importable(Catalogue.installed() if catalogue is None else catalogue)
    axes = (axis for axis in _axes(classes) if axis.role not in (Role.EXPERT, Role.REPLICA))
    return tuple(key for axis in axes if (key := f"mesh.{axis.name}") in options)


def plugin_of(key: str) -> str | None:
    """Return the key of the plugin that an option belongs to; None for a plugin itself and for what is no plugin's."""
    family, _, rest = key.partition(".")
    name, _, field = rest.partition(".")
    return f"{family}.{name}" if field and family != "model" else None


def tables_of(row: Row) -> str:
    """Return a row's plugins and degrees as TOML; keys of other tables are the caller's.

    >>> print(tables_of({"mesh.tp": "2", "sharding.fsdp2": "on", "sharding.fsdp2.zero": "1", "sharding.ddp": "off"}))
    mesh.tp = 2
    sharding.fsdp2 = { zero = 1 }
    """
    lines = [f"{key} = {value}" for key, value in row.items() if key.startswith("mesh.")]
    for key, value in row.items():
        if value == ON:
            fields = [
                f"{other.rpartition('.')[2]} = {given}"
                for other, given in row.items()
                if plugin_of(other) == key and given not in (OFF, DEFAULT)
            ]
            lines.append(f"{key} = {{ {', '.join(fields)} }}" if fields else f"{key} = {{}}")
    return "\n".join(lines)


def _importable(catalogue: Catalogue) -> dict[str, type]:
    from composer3d.errors import PluginError

    found: dict[str, type] = {}
    for name in catalogue.names():
        try:
            found[name] = catalogue.load(name)
        except PluginError:
            continue  # without its extra it is in no manifest here
    return found


def _axes(classes: Mapping[str, type]) -> Iterator[Axis]:
    """Yield the axes that a plugin owns, in the order of the mesh; carved ones are degrees of others' ranks."""
    infos = [info for cls in classes.values() if (info := info_of(cls)) is not None]
    owned = {axis for info in infos for axis in info.owns}
    known = [*AXES, *(axis for info in infos for axis in info.axes)]
    yield from (axis for axis in known if axis.name in owned)


def _values(schema: Mapping[str, Any]) -> list[str]:
    """Return the values of a field beside its default, as TOML."""
    default = schema.get("default")
    if "examples" in schema:
        found: list[Any] = list(schema["examples"])
    else:
        alternatives: Sequence[Mapping[str, Any]] = schema.get("anyOf", [schema])
        found = [value for alternative in alternatives for value in _of_type(alternative)]
    texts = [json.dumps(value) for value in found if value != default or type(value) is not type(default)]
    return list(dict.fromkeys(texts))


def _of_type(schema: Mapping[str, Any]) -> list[Any]:
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "boolean":
        return [True, False]
    if schema.get("type") in ("integer", "number"):
        return [schema[bound] for bound in ("minimum", "maximum") if bound in schema]
    return []
