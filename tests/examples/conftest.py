"""Working folders with a copy of an example; modules imported from them are forgotten afterwards."""

from __future__ import annotations

import sys

import pytest

from composer3d.cli import main


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
