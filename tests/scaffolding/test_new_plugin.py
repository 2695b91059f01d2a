"""Packages of new plugins: their own tests pass, and names that cannot be are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from composer3d.cli import main
from composer3d.cli.new_plugin_command import FAMILIES as OFFERED
from composer3d.registry import FAMILIES, Catalogue

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own_tests(folder):
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tests_of_every_family_pass_and_fail_without_the_plugin(folder, family):
    assert main(["new-plugin", "mine", "--family", family]) == 0
    assert "passed" in own_tests(folder / "mine")
    module = folder / "mine" / "composer3d_mine.py"
    module.write_text(module.read_text().replace("    @hookimpl\n", ""))
    with pytest.raises(AssertionError, match="failed"):
        own_tests(folder / "mine")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_package_is_whole_and_clean(folder, capsys, family):
    assert main(["new-plugin", "two_words", "--family", family, "--to", "here"]) == 0
    written = sorted(str(path.relative_to(folder)) for path in (folder / "here").rglob("*") if path.is_file())
    assert written == [
        "here/.github/workflows/tests.yml",
        "here/README.md",
        "here/composer3d_two_words.py",
        "here/pyproject.toml",
        "here/tests/test_composer3d_two_words.py",
    ]
    project = tomli.loads((folder / "here" / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["composer3d"] == {"two_words": "composer3d_two_words:TwoWords"}
    texts = [(folder / path).read_text() for path in written]
    assert all(word not in text for text in texts for word in ("@NAME", "@CLASS", "@MODULE", "@PROJECT", "@FAMILY"))
    ruff = ["ruff", "--isolated", "check", "--select", "I,F,E,W,UP,B", "--line-length", "120", "."]
    found = subprocess.run([sys.executable, "-m", *ruff], cwd=folder / "here", capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert f"[{family}.two_words]" in capsys.readouterr().out


def test_refusals(folder, capsys):
    (folder / "there").mkdir()
    taken = Catalogue.installed().names()[0]
    for arguments, said in (
        (["there", "--family", "precision"], "there is there and is not overwritten; name another folder with --to"),
        (["Clip", "--family", "precision"], '"Clip" cannot be the name of a plugin; write lower case'),
        (["class", "--family", "precision"], '"class" cannot be the name of a plugin: it is a word of Python'),
        (["json", "--family", "precision"], '"json" cannot be the name of a plugin: it is a module of Python'),
        (["../x", "--family", "precision"], '"../x" cannot be the name of a plugin'),
        ([taken, "--family", "precision"], f'"{taken}" is a plugin already, of {Catalogue.installed().origin(taken)}'),
        (["x", "--family", "precison"], "invalid choice: 'precison'"),
    ):
        assert main(["new-plugin", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["there"]


def test_the_command_offers_every_family():
    assert set(OFFERED) == set(FAMILIES)
