from __future__ import annotations

from pathlib import Path

import pytest

from composer3d.checkpoint import complete, latest, prune
from composer3d.checkpoint.folder import prepare, publish, require
from composer3d.errors import CheckpointError


def make(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names or (".metadata", "state.json"):
        (path / name).touch()
    return path


def test_latest_is_what_the_marker_names(tmp_path):
    make(tmp_path / "step-1")
    make(tmp_path / "step-2")
    (tmp_path / "latest").write_text("step-1\n")
    assert latest(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize("marker", [None, "", "step-7", "../step-1", ".", "step-4"])
def test_latest_without_a_good_marker_is_the_highest_complete_step(tmp_path, marker):
    for name in ("step-9", "step-10", "step-11.tmp", "other"):
        make(tmp_path / name)
    make(tmp_path / "step-4", "state.json")
    make(tmp_path / "step-12", ".metadata")
    if marker is not None:
        (tmp_path / "latest").write_text(marker)
    assert latest(tmp_path) == tmp_path / "step-10"


def test_latest_finds_a_checkpoint_caught_between_two_renames(tmp_path):
    make(tmp_path / "step-1")
    make(tmp_path / "step-2.old")
    assert latest(tmp_path) == tmp_path / "step-2.old"
    (tmp_path / "latest").write_text("step-2")
    assert latest(tmp_path) == tmp_path / "step-2.old"
    make(tmp_path / "step-2")
    assert latest(tmp_path) == tmp_path / "step-2"


def test_latest_of_nothing_is_none(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    make(tmp_path / "step-3.tmp")
    assert latest(tmp_path) is None


@pytest.mark.parametrize(
    ("names", "suffix", "text"),
    [
        ((".metadata",), "", "half-written, or no checkpoint: state.json is missing"),
        (("state.json",), "", "half-written, or no checkpoint: .metadata is missing"),
        (("x",), "", "half-written, or no checkpoint: .metadata and state.json is missing"),
        ((), ".tmp", "this save was never finished"),
    ],
)
def test_incomplete_says_what_is_missing(tmp_path, names, suffix, text):
    path = make(tmp_path / f"step-3{suffix}", *names)
    assert not complete(path)
    with pytest.raises(CheckpointError) as caught:
        require(path)
    assert str(caught.value) == f"{path}: {text}"


def test_missing_names_the_complete_ones(tmp_path):
    make(tmp_path / "step-2")
    make(tmp_path / "step-10")
    with pytest.raises(CheckpointError) as caught:
        require(tmp_path / "step-3")
    text = f"{tmp_path / 'step-3'}: there is no checkpoint here; complete ones there: step-2, step-10"
    assert str(caught.value) == text


def test_prune_keeps_the_last_and_the_marked(tmp_path):
    for number in (1, 2, 9, 10, 11):
        make(tmp_path / f"step-{number}")
    make(tmp_path / "step-3", "state.json")
    (tmp_path / "latest").write_text("step-1")
    assert prune(tmp_path, 2) == (tmp_path / "step-2", tmp_path / "step-9")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-10", "step-11", "step-3"]
    assert prune(tmp_path, 2) == ()


def test_prune_never_removes_all(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        prune(tmp_path, 0)
    assert str(caught.value) == f"{tmp_path}: keep = 0 would remove every checkpoint; at least 1 stays"


def test_prepare_clears_what_killed_runs_left(tmp_path):
    make(tmp_path / "step-1.tmp" / "inner")
    make(tmp_path / "step-2.old")
    make(tmp_path / "step-3.old")
    (make(tmp_path / "step-3") / "new").touch()
    make(tmp_path / "mine.tmp")
    assert prepare(tmp_path / "step-4") == tmp_path / "step-4.tmp"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.tmp", "step-2", "step-3", "step-4.tmp"]
    assert (tmp_path / "step-3" / "new").exists()
    assert list((tmp_path / "step-4.tmp").iterdir()) == []


def test_publish_replaces_and_marks(tmp_path):
    make(tmp_path / "step-1")
    (prepare(tmp_path / "step-1") / "new").touch()
    publish(tmp_path / "step-1")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["latest", "step-1", "step-1/new"]
    assert (tmp_path / "latest").read_text() == "step-1\n"


@pytest.mark.parametrize("name", ["latest", "step-1.tmp", "step-1.old"])
def test_reserved_names_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError) as caught:
        prepare(tmp_path / name)
    assert str(caught.value) == f'{tmp_path / name}: a checkpoint cannot have this name; use for example "step-100"'
