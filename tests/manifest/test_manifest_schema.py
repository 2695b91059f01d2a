from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import Field

from composer3d.manifest import CORE_TABLES, json_schema, table


@table
class Optimizer:
    """The optimizer.

    Args:
        use: Its name.
        lr: Learning rate.
    """

    use: str = "adamw"
    lr: float = Field(default=3e-4, gt=0)
    amsgrad: bool | None = None


@table
class Run:
    """The run."""

    steps: int = Field(gt=0, description="Optimizer steps.")


@table
class Inner:
    """Inner.

    Args:
        depth: How deep.
    """

    depth: int = 1


@table
class Sharding:
    """How parameters are cut.

    The mechanism.

    Args:
        zero: What is cut:
            gradients, or parameters too.

    Memory: less.
    """

    zero: Literal[1, 2, 3] = 3
    units: tuple[str, ...] = ()
    inner: Inner = Inner()
    inners: tuple[Inner, ...] = ()
    need: str


@pytest.fixture
def schema() -> dict[str, Any]:
    return json_schema({**CORE_TABLES, "optimizer": Optimizer, "run": Run}, {"sharding": {"cut": Sharding}})


def table_of(schema, entry):
    if "$ref" not in entry:  # a table that may be a string says all by itself
        return entry
    reference = entry["$ref"]
    assert reference.startswith("#/$defs/")
    return schema["$defs"][reference.removeprefix("#/$defs/")]


def test_the_top_of_a_manifest(schema):
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["composer3d"]
    assert list(schema["properties"]) == [
        "composer3d",
        "extends",
        "mesh",
        "model",
        "train",
        "optimizer",
        "run",
        "sharding",
    ]
    assert schema["properties"]["composer3d"]["const"] == 1
    assert schema["properties"]["extends"]["type"] == "string"
    assert json.loads(json.dumps(schema)) == schema


def test_short_forms_are_allowed_where_they_mean_something(schema):
    properties = schema["properties"]
    assert properties["optimizer"]["type"] == ["object", "string"]
    assert list(properties["run"]) == ["$ref"]
    assert list(properties["model"]) == ["$ref"]  # the core's own [model] has no `use`
    assert properties["sharding"]["type"] == "object"
    assert list(properties["sharding"]["properties"]["cut"]) == ["$ref"]


def test_no_table_is_a_choice_of_which_editors_show_only_the_first(schema):
    """With `anyOf` of a table and something else, an editor says that neither fits, and not which key is wrong."""
    tables = [schema["properties"], schema["properties"]["sharding"]["properties"]]
    assert not [name for table in tables for name, entry in table.items() if {"anyOf", "oneOf"} & set(entry)]


def test_no_table_takes_unknown_keys(schema):
    assert set(schema["$defs"]) == {"MeshTable", "ModelTable", "TrainTable", "Optimizer", "Run", "Sharding", "Inner"}
    assert all(definition["additionalProperties"] is False for definition in schema["$defs"].values())


def test_a_plugin_by_reference_is_allowed_in_its_family(schema):
    assert schema["properties"]["sharding"]["additionalProperties"] == {
        "type": "object",
        "additionalProperties": True,
        "required": ["use"],
        "properties": {"use": {"type": "string"}},
    }


def test_keys_have_types_bounds_defaults_and_descriptions(schema):
    sharding = table_of(schema, schema["properties"]["sharding"]["properties"]["cut"])
    assert sharding["description"] == "How parameters are cut.\n\nThe mechanism."
    assert sharding["properties"]["zero"] == {
        "enum": [1, 2, 3],
        "type": "integer",
        "default": 3,
        "description": "What is cut: gradients, or parameters too.",
    }
    assert sharding["properties"]["units"] == {"type": "array", "items": {"type": "string"}, "default": []}
    optimizer = table_of(schema, schema["properties"]["optimizer"])
    assert optimizer["properties"]["lr"] == {
        "type": "number",
        "exclusiveMinimum": 0,
        "default": 3e-4,
        "description": "Learning rate.",
    }
    assert schema["$defs"]["Inner"]["properties"]["depth"]["description"] == "How deep."


def test_null_is_never_offered(schema):
    assert table_of(schema, schema["properties"]["optimizer"])["properties"]["amsgrad"] == {"type": "boolean"}
    assert "null" not in json.dumps(schema)


def test_required_keys_may_come_from_a_base(schema):
    assert all("required" not in definition for definition in schema["$defs"].values())
    assert schema["if"] == {"additionalProperties": True, "required": ["extends"]}
    cut = {"additionalProperties": True, "required": ["need"]}
    assert schema["else"] == {
        "additionalProperties": True,
        "required": ["run"],
        "properties": {
            "run": {"additionalProperties": True, "required": ["steps"]},
            "sharding": {"additionalProperties": True, "properties": {"cut": cut}},
        },
    }


def test_nothing_is_required_where_all_keys_have_defaults():
    schema = json_schema({}, {})
    assert "else" not in schema and "if" not in schema
    assert list(schema["properties"]) == ["composer3d", "extends"]
    assert "else" not in json_schema(CORE_TABLES, {"sharding": {}})
