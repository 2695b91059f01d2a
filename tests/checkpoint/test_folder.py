from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer3d.checkpoint import complete, find_checkpoint, latest, prune
from composer3d.checkpoint.checkpoint_folder import prepare, publish, require
from composer3d.checkpoint.checksums import digest
from composer3d.errors import CheckpointError


def make(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names or (".metadata", "state.json"):
        (path / name).touch()
    return path


def publish_step(folder: Path, name: str) -> None:
    beside = prepare(folder / name)
    for file in (".metadata", "state.json"):
        (beside / file).touch()
    publish(folder / name)


def test_latest_is_what_the_marker_names(tmp_path):
    make(tmp_path / "step-1")
    make(tmp_path / "step-2")
    (tmp_path / "latest").write_text("step-1\n")
    assert latest(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize("marker", [None, f"step-7\n{digest(b'step-7')}\n"])
def test_latest_of_no_marker_or_one_whose_checkpoint_is_gone_is_the_highest_complete_step(tmp_path, marker, caplog):
    for name in ("step-9", "step-10", "step-11.tmp", "other"):
        make(tmp_path / name)
    make(tmp_path / "step-4", "state.json")
    make(tmp_path / "step-12", ".metadata")
    if marker is not None:
        (tmp_path / "latest").write_text(marker)
    assert latest(tmp_path) == tmp_path / "step-10"
    assert caplog.messages == ([f"{tmp_path / 'latest'} names step-7, which is gone; taking step-10"] if marker else [])


@pytest.mark.parametrize(
    "marker", ["", "step-1", "../step-1\n", ".\n", "..\n", "x" * 5000, "step-7\n", "step-1\nmore\n", "\0\n"]
)
def test_a_damaged_marker_is_refused(tmp_path, marker):
    make(tmp_path / "step-1")
    make(tmp_path / "step-10")
    (tmp_path / "latest").write_text(marker)
    with pytest.raises(CheckpointError) as caught:
        latest(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'latest'}: damaged: it does not name a checkpoint; remove it to take the highest step, or write "
        "the name of a checkpoint into it, and a newline; complete ones there: step-1, step-10"
    )


def test_every_bit_of_a_marker_counts(tmp_path):
    for number in range(1, 20):
        make(tmp_path / f"step-{number}")
    publish_step(tmp_path, "step-12")
    good = (tmp_path / "latest").read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (tmp_path / "latest").write_bytes(bad)
        with pytest.raises(CheckpointError):
            latest(tmp_path)
    for length in range(len(good)):
        (tmp_path / "latest").write_bytes(good[:length])
        try:
            assert latest(tmp_path) == tmp_path / "step-12"
        except CheckpointError:
            assert length != len("step-12\n")


def test_a_marker_that_is_a_pipe_is_refused(tmp_path):
    make(tmp_path / "step-1")
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="it is no ordinary file"):
        latest(tmp_path)


def test_a_marked_checkpoint_that_lacks_files_is_not_passed_over(tmp_path):
    make(tmp_path / "step-9")
    make(tmp_path / "step-10", "state.json")
    (tmp_path / "latest").write_text("step-10\n")
    with pytest.raises(CheckpointError) as caught:
        latest(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'step-10'}: damaged: .metadata is missing, and {tmp_path / 'latest'} names it as the newest; "
        "to go on from another one, name that; complete ones there: step-9"
    )


def test_latest_finds_a_checkpoint_caught_between_two_renames(tmp_path):
    make(tmp_path / "step-1")
    make(tmp_path / "step-2.old")
    assert latest(tmp_path) == tmp_path / "step-2.old"
    (tmp_path / "latest").write_text("step-2\n")
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
    (tmp_path / "latest").write_text("step-1\n")
    assert prune(tmp_path, 2) == (tmp_path / "step-2", tmp_path / "step-9")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-10", "step-11", "step-3"]
    assert prune(tmp_path, 2) == ()


def test_prune_spares_what_it_is_told_to(tmp_path):
    for number in (1, 2, 3, 4):
        make(tmp_path / f"step-{number}")
    assert prune(tmp_path, 1, spare=("step-2",)) == (tmp_path / "step-1", tmp_path / "step-3")


def test_prune_never_removes_all(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        prune(tmp_path, 0)
    assert str(caught.value) == f"{tmp_path}: keep = 0 would remove every checkpoint; at least 1 stays"


def test_prepare_clears_what_killed_runs_left(tmp_path):
    make(tmp_path / "step-1.tmp", ".metadata.tmp", "__0_0.distcp", "state.json")
    make(tmp_path / "step-2.old")
    make(tmp_path / "step-3.old")
    (make(tmp_path / "step-3") / "new").touch()
    make(tmp_path / "mine.tmp")
    assert prepare(tmp_path / "step-4") == tmp_path / "step-4.tmp"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.tmp", "step-2", "step-3", "step-4.tmp"]
    assert (tmp_path / "step-3" / "new").exists()
    assert list((tmp_path / "step-4.tmp").iterdir()) == []


@pytest.mark.parametrize("left", ["link", "dangling", "file"])
def test_prepare_removes_a_link_and_leaves_what_it_leads_to(tmp_path, left):
    if left == "file":
        (tmp_path / "step-1.tmp").touch()
    else:
        (tmp_path / "step-1.tmp").symlink_to(tmp_path / "elsewhere")
    if left == "link":
        make(tmp_path / "elsewhere")
    assert list(prepare(tmp_path / "step-1").iterdir()) == []
    assert left != "link" or complete(tmp_path / "elsewhere")


def test_prune_of_a_checkpoint_that_was_moved_away_removes_the_link_to_it(tmp_path):
    make(tmp_path / "disk")
    (tmp_path / "step-1").symlink_to(tmp_path / "disk")
    publish_step(tmp_path, "step-2")
    assert prune(tmp_path, 1) == (tmp_path / "step-1",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "latest", "step-2"]
    assert complete(tmp_path / "disk")


def test_prune_leaves_others_files_and_names_them(tmp_path, caplog):
    make(tmp_path / "step-1", "scores.json", ".metadata", "state.json", "__0_0.distcp", "checksums.json")
    make(tmp_path / "step-1" / "plots", "loss.png")
    make(tmp_path / "step-2")
    publish_step(tmp_path, "step-3")
    assert prune(tmp_path, 1) == (tmp_path / "step-1", tmp_path / "step-2")
    left = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "step-1").rglob("*"))
    assert left == ["step-1/plots", "step-1/plots/loss.png", "step-1/scores.json"]
    assert caplog.messages == [
        f"{tmp_path / 'step-1'}: holds plots, scores.json, which no save wrote; the checkpoint is removed, and that is "
        "left"
    ]
    assert prune(tmp_path, 1) == () and latest(tmp_path) == tmp_path / "step-3"


def test_publish_replaces_and_marks(tmp_path):
    make(tmp_path / "step-1")
    (prepare(tmp_path / "step-1") / "new").touch()
    publish(tmp_path / "step-1")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["latest", "step-1", "step-1/new"]
    assert (tmp_path / "latest").read_text().splitlines() == ["step-1", digest(b"step-1")]


@pytest.mark.parametrize("taken", ["file", "folder", "folders", "link", "empty", "beside", "marker", "linked marker"])
def test_what_no_save_wrote_is_neither_replaced_nor_removed(tmp_path, taken):
    path = make(tmp_path / "mine") / "run"
    if taken == "folder":
        make(path, "thesis.tex", *(".metadata", "state.json"))
    elif taken == "folders":
        make(make(path) / "10")
    elif taken in ("link", "empty"):
        path.symlink_to(make(tmp_path / "real", "f") if taken == "link" else tmp_path / "none")
    elif taken == "linked marker":
        path.with_name("latest").symlink_to(tmp_path / "mine")
    else:
        path.with_name({"file": "run", "beside": "run.tmp", "marker": "latest"}[taken]).write_text("a\nb\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="run: |run.tmp: is a file|latest: is not the marker") as caught:
        prepare(path)
    assert "move it away, or save" in str(caught.value) and sorted(tmp_path.rglob("*")) == before
    assert all(each.read_text() == "a\nb\n" for each in before if each.is_file() and each.stat().st_size)


def test_folders_with_a_killed_saves_name_and_others_files_are_left(tmp_path, caplog):
    make(tmp_path / "step-1.tmp", "notes.txt")
    prepare(tmp_path / "step-2")
    assert (tmp_path / "step-1.tmp" / "notes.txt").exists()
    assert caplog.messages == [f"{tmp_path / 'step-1.tmp'}: holds notes.txt, which no save wrote; it is left as it is"]


def test_an_earlier_checkpoint_an_empty_folder_and_a_link_to_a_checkpoint_are_replaced(tmp_path):
    make(tmp_path / "disk")
    (tmp_path / "step-1").symlink_to(tmp_path / "disk")
    (tmp_path / "step-2").mkdir()
    for name in ("step-1", "step-2", "step-2"):
        publish_step(tmp_path, name)
        assert complete(tmp_path / name) and not (tmp_path / name).is_symlink()


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("/proc/x", "FileNotFoundError: [Errno 2] No such file or directory: '/proc/x.tmp'"),
        ("/dev/null/x", "FileExistsError: [Errno 17] File exists: '/dev/null'"),
        ("x" * 300, f"OSError: [Errno 36] File name too long: '{'x' * 300}'"),
    ],
)
def test_places_where_nothing_can_be_written_are_named_with_the_cause(path, cause):
    with pytest.raises(CheckpointError) as caught:
        prepare(Path(path))
    assert str(caught.value) == (
        f"{path}: no checkpoint can be written there ({cause}); save into a folder that this user may write to, on a "
        "disk that all ranks share"
    )


def test_paths_that_cannot_be_read_are_named_with_the_cause():
    with pytest.raises(CheckpointError, match=r"^x+: cannot be read \(OSError: \[Errno 36\] File name too long"):
        find_checkpoint(Path("x" * 300))


@pytest.mark.parametrize("name", ["latest", "step-1.tmp", "step-1.old", ".", "..", "a\0b"])
def test_reserved_names_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError) as caught:
        prepare(Path(name) if name.strip(".") == "" else tmp_path / name)
    assert str(caught.value).endswith(': a checkpoint cannot have this name; use for example "step-100"')


def test_reports_of_a_run_say_that_its_marker_is_damaged(tmp_path):
    from composer3d.diagnostics.doctor.advice import _resume
    from composer3d.runner.reporting.failures import FailureReport

    make(tmp_path / "checkpoints" / "step-1")
    (tmp_path / "checkpoints" / "latest").write_text("step-1")
    damaged = f"{tmp_path / 'checkpoints' / 'latest'}: damaged: "
    report = FailureReport(rank=0, world_size=1, host="here", pid=1, time_ns=0, kind="crash")
    assert damaged in report.render(tmp_path) and _resume(tmp_path).startswith(damaged)


@pytest.mark.parametrize("name", ["step-4", None])
def test_advice_after_a_damaged_newest_checkpoint_names_the_one_before_it(tmp_path, name):
    from composer3d.diagnostics.doctor.advice import _resume

    folder = tmp_path / "checkpoints"
    for each in filter(None, (name, "step-6")):
        publish_step(folder, each)
    message = "out/checkpoints/step-6/__0_0.distcp: damaged: bytes 0 to 10 are not what was written"
    advice = _resume(tmp_path, {"error": "CheckpointError", "message": message})
    goes_on = f"--resume {folder / 'step-4'} goes on from the one before it" if name else "--resume never begins anew"
    assert advice == f"{folder / 'step-6'} is damaged, and the next run would begin with it; {goes_on}"
    other = {"error": "CheckpointError", "message": "out/checkpoints/step-61: full"}
    assert _resume(tmp_path, other) == "the next run goes on from checkpoints/step-6"
