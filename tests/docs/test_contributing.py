"""CONTRIBUTING.md does what it says: its example passes its tests, and the rules are those in force."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
import test_architecture
from support.documents import ROOT, blocks, code, files, read, table

from composer3d.checkpoint import checkpoint_folder, checksums
from composer3d.mesh import AXES

CONTRIBUTING = read("CONTRIBUTING.md")
PROJECT = tomllib.loads(read("pyproject.toml"))
PLUGINS = PROJECT["project"]["entry-points"]["composer3d"]


@pytest.mark.parametrize(
    ("chosen", "number"),
    [("not test_conformance or effect", 9), pytest.param("test_", 18, marks=pytest.mark.slow)],
)
def test_the_examples_pass_their_tests(tmp_path, chosen, number):
    for name, text in files(CONTRIBUTING).items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{number} passed", done.stdout, re.MULTILINE), done.stdout


def test_every_block_is_a_file():
    assert [block.line for block in blocks(CONTRIBUTING) if block.mark not in files(CONTRIBUTING)] == []


@pytest.mark.parametrize("name", PLUGINS)
def test_the_tests_of_a_plugin_have_its_headings(name):
    # The other four things that a plugin brings are looked for in test_plugins_documented.py.
    # A plugin with much to test has further files, by subject.
    tests = "".join(read(f"tests/plugins/{file.name}") for file in (ROOT / "tests/plugins").glob(f"test_{name}*.py"))
    for heading in ("collectives", "refus"):
        assert re.search(rf"^def test_\w*{heading}", tests, re.MULTILINE), heading


def test_the_tiers_are_markers():
    markers = {marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    commands = [code(row[1])[0] for row in table(CONTRIBUTING, "tier", "command", "when")]
    assert {match[1] for command in commands if (match := re.search(r"-m (\w+)", command))} == markers
    assert f".venv/bin/{commands[0]}\n" in read("README.md")


def test_the_layers_are_those_enforced():
    stated = " ".join(re.search(r"Imports run one way: (.*?)\. No cycles", CONTRIBUTING, re.DOTALL)[1].split())
    assert stated == "; ".join(", ".join(layer) for layer in test_architecture.LAYERS)


def test_the_limits_are_those_enforced():
    files_of, functions_of = test_architecture.MAX_FILE_LINES, test_architecture.MAX_FUNCTION_LINES
    assert f"Files of at most {files_of} lines, functions of at most {functions_of} (40 is the aim)" in CONTRIBUTING


def test_the_way_of_a_parameter_is_through_functions_that_there_are():
    places = [code(row[0])[0].split(": ") for row in table(CONTRIBUTING, "function", "what becomes of the parameter")]
    assert [place for place in places if f"\ndef {place[1]}(" not in read(place[0])] == []


def test_words():
    axes = ", ".join(f"`{axis.name}`" for axis in AXES).replace("`dp_shard`, ", "`dp_shard`,\n  ")
    assert f"Axes are {axes}." in CONTRIBUTING


def test_files_of_a_checkpoint():
    named = {code(row[0])[0] for row in table(CONTRIBUTING, "file", "content")}
    assert named == {checkpoint_folder.METADATA, "__R_I.distcp", checksums.CHECKSUMS, checkpoint_folder.STATE}
    assert f"then the file `{checkpoint_folder.MARKER}`" in CONTRIBUTING
