"""Tables of the documents name what there is: hooks, plugins, keys, commands, exit codes, and tests that exist."""

from __future__ import annotations

import argparse
import inspect
import re
import tomllib
from itertools import chain

import pytest
from support.documents import ROOT, code, read, table, tables

from composer3d.cli import build_parser
from composer3d.hookspecs import HookSpecs
from composer3d.manifest import mesh_table
from composer3d.manifest.descriptions import fields
from composer3d.registry import FAMILIES, Catalogue, info_of
from composer3d.runner import TABLES


def test_hooks():
    rows = table(read("CONTRIBUTING.md"), "family", "hook", "gives")
    signatures = {
        name: ", ".join(list(inspect.signature(function).parameters)[1:])
        for name, function in vars(HookSpecs).items()
        if name.startswith("composer3d_")
    }
    assert [code(row[1])[0] for row in rows] == [f"{name}({arguments})" for name, arguments in signatures.items()]
    assert [code(row[1])[0].partition("(")[0] for row in rows if row[2].startswith("query: ")] == [
        name for name, function in vars(HookSpecs).items() if (function.__doc__ or "").startswith("Query: ")
    ]
    assert list(dict.fromkeys(row[0] for row in rows)) == [*FAMILIES, "life cycle"]


def test_plugins():
    catalogue = Catalogue.installed()
    built_in = tomllib.loads(read("pyproject.toml"))["project"]["entry-points"]["composer3d"]
    headings = ("plugin", "family", "does", "memory a rank", "collectives a step", "options")
    rows = table(read("plugins/README.md"), *headings)
    assert sorted(code(row[0])[0] for row in rows) == sorted(built_in)
    for name, family, does, memory, collectives, options in rows:
        cls = catalogue.load(code(name)[0])
        assert info_of(cls).family == family
        assert code(options) == list(fields(cls)), name
        assert does and memory and collectives, name


def test_tables_of_a_manifest():
    stated = table(read("composer3d/manifest/README.md"), "table", "keys", "about")
    rows = {code(row[0])[0].strip("[]"): sorted(code(row[1])) for row in stated}
    rows.pop("family.name")
    assert rows == {name: sorted(fields(cls)) for name, cls in {**TABLES, "mesh": mesh_table(())}.items()}


# ---- commands --------------------------------------------------------------------------------------------------------

COMMANDS = read("composer3d/cli/README.md")


def subcommands():
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def test_commands():
    rows = table(COMMANDS, "command", "does")
    found = {code(name)[0].split()[0]: (code(name)[0].split()[1:], does) for name, does in rows}
    parsers = subcommands()
    assert list(found) == list(parsers)
    for name, (arguments, does) in found.items():
        usage = " ".join(parsers[name].format_usage().split())
        for word in [*arguments, *re.findall(r"--[a-z-]+", does)]:
            assert word in usage, (name, word)


def test_the_readme_names_every_command():
    section = read("README.md").partition("\n## Commands\n")[2].partition("\n## ")[0]
    named = [word.split()[0] for line in section.partition(":\n")[2].splitlines() for word in code(line)]
    assert set(named) == set(subcommands())


def test_exit_codes():
    epilog = " ".join(build_parser().epilog.split())
    rows = table(COMMANDS, "code", "meaning")
    assert [number for number, _ in rows] == re.findall(r"\b(\d+) ", epilog.partition("Exit codes: ")[2])
    for number, meaning in rows:
        assert f"{number} {meaning.partition(';')[0]}" in epilog


# ---- proofs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "headings"),
    [("tests/README.md", ("guarantee", "proof")), ("plugins/README.md", ("refused", "reason", "test"))],
)
def test_proofs_are_there(name, headings):
    for row in chain(*tables(read(name), *headings)):
        named = code(row[-1])
        assert named, row
        for proof in named:
            path, _, function = proof.partition("::")
            assert (ROOT / path).is_file(), proof
            assert not function or f"\ndef {function}(" in read(path), proof
