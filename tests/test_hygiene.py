"""What tests leave behind is found: in the worker's own temporary folder, after each of them."""

from __future__ import annotations

import ast
import os
import tempfile
from pathlib import Path

import pytest
from support.temporary_folders import leaving_nothing, session_folder

from composer3d.processes.forking import limit_ranks

TESTS = Path(__file__).parent
MAKERS = {"mkdtemp", "mkstemp"}


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_worker_has_a_temporary_folder_of_its_own(tmp_path):
    folder = Path(tempfile.gettempdir())
    assert folder.name.startswith("composer3d-tests.") and not tmp_path.is_relative_to(folder)


def test_what_a_test_leaves_is_named(own, monkeypatch):
    monkeypatch.setattr("support.temporary_folders.ENDING_S", 0.0)
    (own / "composer3d-before").mkdir()
    with pytest.raises(AssertionError) as caught, leaving_nothing():
        (own / "composer3d-left").mkdir()
        (own / "composer3d-left" / "file").touch()
        (own / "of-a-browser").mkdir()
    assert str(caught.value) == f"stays behind in {own}: {{'composer3d-left': ['file']}}"


def test_what_goes_in_time_is_no_fault(own):
    with leaving_nothing():
        tempfile.mkdtemp(dir=session_folder())
        with tempfile.TemporaryDirectory(prefix="composer3d-"):
            pass


def test_ranks_of_all_workers_are_counted_together():
    with limit_ranks(1):
        places = Path(tempfile.gettempdir(), f"composer3d-ranks-{os.getuid()}")
        assert {path.stat().st_nlink > 1 for path in places.iterdir()} == {True}


def test_files_are_short():
    lengths = {str(path.relative_to(TESTS)): len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


def test_tests_make_no_temporary_folder_that_nobody_removes():
    calls = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in MAKERS
        if "dir" not in {keyword.arg for keyword in node.keywords}
    ]
    assert calls == []
