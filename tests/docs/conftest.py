from __future__ import annotations

import sys

import pytest
from support.documents import DOCUMENTS, files, read

from composer3d.cli import main
from composer3d.processes.forking import limit_ranks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of all documents and some text; modules imported from it are forgotten afterwards."""
    for document in DOCUMENTS:
        for name, text in files(read(document)).items():
            (tmp_path / name).write_text(text)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text(read("LICENSE"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def composer3d(capfd):
    """Run a command line of a document; return what it writes, messages before results."""

    def run(line):
        program, *arguments = line.split()
        assert program == "composer3d"
        with limit_ranks(2):
            main(arguments)
        written = capfd.readouterr()
        return written.err + written.out

    return run
