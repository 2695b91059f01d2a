"""Working folders with a copy of an example; modules imported from them are forgotten afterwards."""

from __future__ import annotations

import importlib
import sys

import pytest

from composer3d.cli import main
from composer3d.testing.conformance import HEADINGS, Conformance, conformance_checks, run_conformance


@pytest.fixture
def copied(tmp_path, monkeypatch, capsys):
    """Copy an example by `init`, and make the copy the working folder, importable."""
    folder, before = tmp_path / "example", set(sys.modules)

    def copy(name):
        assert main(["init", name, "--to", str(folder)]) == 0
        capsys.readouterr()
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        return folder

    yield copy
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def effect(copied):
    """Return what the conformance suite sees of the plugin of an example, copied here."""

    def see(example, module, name, **options):
        copied(example)
        plugin = getattr(importlib.import_module(module), name)
        (check,) = conformance_checks(Conformance(plugin=plugin, options=(options,)), headings=("effect",))
        return check()

    return see


@pytest.fixture
def conforms(copied):
    """Assert every heading of the conformance suite but the matrix for the plugin of an example."""

    def judge(example, module, name, **options):
        copied(example)
        plugin = getattr(importlib.import_module(module), name)
        found = list(run_conformance(Conformance(plugin=plugin, options=(options,)), headings=HEADINGS[:-1]))
        assert [f"{finding.heading}: {finding.verdict}: {finding.detail}" for finding in found if not finding.ok] == []

    return judge
