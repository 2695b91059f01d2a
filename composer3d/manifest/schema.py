"""The JSON schema of a whole manifest, so that editors complete and check what `check` checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema

from composer3d.manifest.descriptions import describe_keys, fields, summary
from composer3d.manifest.document import FORMAT
from composer3d.manifest.layers import SUGAR_TABLES

__all__ = ["json_schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Generator(GenerateJsonSchema):
    """Adds the descriptions that docstrings hold; leaves out titles that only repeat a key, and null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> dict[str, Any]:
        result = super().default_schema(schema)
        if result.get("default", ...) is None:
            del result["default"]
        return result

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> dict[str, Any]:
        result = super().dataclass_schema(schema)
        cls = schema["cls"]
        result["description"] = summary(cls)
        for key, text in describe_keys(cls).items():
            result["properties"][key].setdefault("description", text)
        return result


def json_schema(tables: Mapping[str, type], plugins: Mapping[str, Mapping[str, type]]) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of manifests with these tables and plugins.

    Keys without a default are demanded only of manifests that extend no other: a base may hold them. `table = false`,
    which removes an inherited table, is left out, so that editors say which key of a table is wrong and not that a
    table is no boolean; `check` takes it.

    Args:
        tables: Top-level tables by name.
        plugins: Plugin classes by family and name.
    """
    classes = [*tables.values(), *(cls for family in plugins.values() for cls in family.values())]
    unique = list(dict.fromkeys(classes))
    references, definitions = models_json_schema([(cls, "validation") for cls in unique], schema_generator=_Generator)
    needs: dict[type, list[str]] = {}
    for cls in unique:
        reference: Any = references[(cls, "validation")]
        needs[cls] = definitions["$defs"][reference["$ref"].rpartition("/")[2]].pop("required", [])

    def entry(name: str, cls: type) -> dict[str, Any]:
        reference: Any = references[(cls, "validation")]
        if name not in SUGAR_TABLES or "use" not in fields(cls):
            return dict(reference)
        # `properties` applies to tables alone, so one schema covers both forms, and an editor names the key.
        return {**definitions["$defs"][reference["$ref"].rpartition("/")[2]], "type": ["object", "string"]}

    properties: dict[str, Any] = {
        "composer3d": {"const": FORMAT, "description": "The manifest format."},
        "extends": {"type": "string", "description": "A manifest to start from: a path, or a shipped name."},
    }
    properties |= {name: entry(name, cls) for name, cls in tables.items()}
    properties |= {
        family: _family({name: entry("", cls) for name, cls in members.items()}) for family, members in plugins.items()
    }
    return {
        "$schema": _DIALECT,
        "title": "composer3d manifest",
        "type": "object",
        "additionalProperties": False,
        "required": ["composer3d"],
        "properties": properties,
        **_unless_extending(tables, plugins, needs),
        "$defs": definitions.get("$defs", {}),
    }


def _family(members: Mapping[str, Any]) -> dict[str, Any]:
    # A plugin that is not installed, but named by reference, may have any keys beside `use`.
    use = {"use": {"type": "string"}}
    by_reference = {"type": "object", "additionalProperties": True, "required": ["use"], "properties": use}
    return {"type": "object", "additionalProperties": by_reference, "properties": members}


def _unless_extending(
    tables: Mapping[str, type], plugins: Mapping[str, Mapping[str, type]], needs: Mapping[type, list[str]]
) -> dict[str, Any]:
    """Return the condition under which required keys are required; `required` ignores strings and false."""
    # Explicit, because tombi refuses further keys by default.
    open_table = {"additionalProperties": True}
    needed: dict[str, Any] = {
        name: {**open_table, "required": needs[cls]} for name, cls in tables.items() if needs[cls]
    }
    required = list(needed)
    for family, members in plugins.items():
        inner = {name: {**open_table, "required": needs[cls]} for name, cls in members.items() if needs[cls]}
        needed |= {family: {**open_table, "properties": inner}} if inner else {}
    if not needed:
        return {}
    otherwise = {**open_table, "required": required, "properties": needed}
    return {"if": {**open_table, "required": ["extends"]}, "else": otherwise}
