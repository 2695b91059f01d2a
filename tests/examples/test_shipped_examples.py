"""Shipped examples: listed, copied whole, accepted by `check`, and started by the commands that they name."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d.cli import main
from composer3d.examples import shipped_examples

EXAMPLES = shipped_examples()
FOLDER = Path(__file__).parents[2] / "composer3d" / "examples"


def test_every_folder_is_an_example():
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(EXAMPLES)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_says_what_it_is_and_has_tests_of_its_own(name):
    example = EXAMPLES[name]
    assert example.start and 10 < len(example.summary) <= 100
    assert (Path(__file__).parent / f"test_{name.replace('-', '_')}_example.py").is_file()
    for path, text in example.files.items():
        assert text.isascii() and len(text.splitlines()) < 400, path
        assert not path.endswith(".py") or ast.get_docstring(ast.parse(text)), path


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_copy_is_whole_and_names_its_schema_and_its_commands(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 0
    commands = [f"cd {name}", *EXAMPLES[name].start]
    assert capsys.readouterr().out.endswith("\nnext:\n" + "".join(f"  {line}\n" for line in commands))
    for path, text in EXAMPLES[name].files.items():
        first = "#:schema composer3d.schema.json\n" if path == "run.toml" else ""
        assert Path(name, path).read_text() == first + text
    assert Path(name, "composer3d.schema.json").is_file()


def test_a_copy_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own-model").mkdir()
    assert main(["init", "own-model"]) == 2
    told = "own-model exists and is not overwritten; name another folder with --to FOLDER\n"
    assert capsys.readouterr().err == told
    assert list(Path("own-model").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_its_commands_start_it(name, copied):
    copied(name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for command in EXAMPLES[name].start:
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
