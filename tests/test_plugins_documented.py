"""Entry point, row in plugins/README.md, tests and full docstring of every built-in plugin."""

from __future__ import annotations

import inspect
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from support.documents import code, read, table

from composer3d.manifest.descriptions import describe_keys, fields, summary
from composer3d.registry import FAMILIES, info_of

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ROOT / "plugins" / "composer3d_plugins"
COLUMNS = ("plugin", "family", "does", "memory a rank", "collectives a step", "options")
# A plugin is a module, or a package of the same name, in the folder of its family.
FILES = {
    path.stem: path
    for path in sorted(PLUGINS.glob("*/*"))
    if path.name not in ("__init__.py", "__pycache__") and (path.suffix == ".py" or (path / "__init__.py").is_file())
}


@cache
def entry_points():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["composer3d"]


@cache
def documented_rows():
    """Return the rows of plugins/README.md's table of plugins by name."""
    return {code(row[0])[0]: row for row in table(read("plugins/README.md"), *COLUMNS)}


def load(name):
    module, _, cls = entry_points()[name].partition(":")
    return getattr(__import__(module, fromlist=[cls]), cls)


def test_there_are_plugins_in_every_folder_of_a_family():
    folders = {path.name for path in PLUGINS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(FAMILIES)
    assert FILES


@pytest.mark.parametrize("name", FILES)
def test_its_entry_point_has_its_name(name):
    module, _, cls = entry_points()[name].partition(":")
    assert module == f"composer3d_plugins.{FILES[name].parent.name}.{name}"
    assert inspect.isclass(load(name)) and load(name).__name__ == cls


def test_every_entry_point_has_its_file():
    assert sorted(entry_points()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_its_family_is_its_folder(name):
    assert info_of(load(name)).family == FILES[name].parent.name


@pytest.mark.parametrize("name", FILES)
def test_it_has_a_row_in_the_table_of_plugins(name):
    cells = documented_rows().get(name)
    assert cells is not None, f"plugins/README.md has no table row whose first cell is `{name}`"
    assert all(cells[1:]) and len(cells) > 1, f"the row of {name} has an empty cell"


@pytest.mark.parametrize("name", FILES)
def test_it_has_tests(name):
    tests = ROOT / "tests" / "plugins" / f"test_{name}.py"
    assert tests.is_file(), f"there is no tests/plugins/{tests.name}"
    assert re.search(rf"\b{name}\b", tests.read_text()), f"{tests.name} does not name the plugin in a manifest"


@pytest.mark.parametrize("name", FILES)
def test_its_docstring_says_what_it_costs(name):
    text = inspect.getdoc(load(name))
    first = text.splitlines()[0]
    assert first.endswith(".") and first[0].isupper(), first
    for line in ("Memory:", "Collectives:"):
        assert re.search(rf"^ *{line} \S", text, re.MULTILINE), f'{name} does not say "{line}"'
    assert summary(load(name))


@pytest.mark.parametrize("name", FILES)
def test_its_docstring_explains_every_key(name):
    cls = load(name)
    assert sorted(describe_keys(cls)) == sorted(fields(cls))


@pytest.mark.parametrize("name", FILES)
def test_its_hooks_say_what_they_do(name):
    hooks = {key: value for key, value in vars(load(name)).items() if key.startswith("composer3d_")}
    assert hooks
    assert [key for key, value in hooks.items() if not inspect.getdoc(value)] == []
