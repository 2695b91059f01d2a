from __future__ import annotations

import datetime
import math

import pytest
import tomli

from composer3d.manifest.toml_writer import dotted, dump, inline

VALUES = [
    True,
    False,
    0,
    -5,
    2**70,
    1.0,
    1e16,
    1e-05,
    -0.1,
    math.inf,
    -math.inf,
    "",
    'quote " back \\ slash',
    "line\nbreak\ttab\x00\x1f\x7f",
    "caf\u00e9 \u2028 \U0001f600",
    [],
    [1, [2, "x"], {"a": {"b c": 1}}],
    datetime.date(2020, 1, 2),
    datetime.time(1, 2, 3, 400),
    datetime.datetime(2020, 1, 2, 3, 4, 5),
    datetime.datetime(2020, 1, 2, 3, 4, 5, 600, tzinfo=datetime.UTC),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_read_back_equal(value):
    read = tomli.loads(f"x = {inline(value)}")["x"]
    assert read == value
    assert type(read) is type(value)


def test_nan_reads_back():
    assert math.isnan(tomli.loads(f"x = {inline(math.nan)}")["x"])


def test_documents_read_back_equal():
    tables = {
        "composer3d": 1,
        "empty": {},
        "only": {"tables": {"inside": {"x": 1}, "nothing": {}}},
        "mixed": {"sub": {"y": 1}, "x": 2, "list": [{"a": 1}, {"b": {"c": 2}}]},
        "top": "after a table",
        "": {"": {"a.b": {'"': 1}}},
        **{f"v{index}": value for index, value in enumerate(VALUES)},
    }
    assert tomli.loads(dump(tables)) == tables
    assert tomli.loads(dump({})) == {}


def test_a_document_looks_as_a_person_would_write_it():
    tables = {"composer3d": 1, "train": {"steps": 3}, "sharding": {"fsdp2": {}, "ddp": {"x": {"y z": [1, 2]}}}}
    assert dump(tables) == (
        'composer3d = 1\n\n[train]\nsteps = 3\n\n[sharding.fsdp2]\n\n[sharding.ddp.x]\n"y z" = [1, 2]\n'
    )


def test_what_toml_cannot_say_is_refused():
    with pytest.raises(TypeError, match=r"^TOML has no NoneType$"):
        inline(None)


def test_key_paths_as_a_user_writes_them():
    assert dotted(("a", "b.c", 0, "d")) == 'a."b.c"[0].d'
    assert dotted(()) == ""
