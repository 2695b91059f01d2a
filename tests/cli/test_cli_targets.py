"""Files and folders that commands write: refused in words where they cannot be, and before work that takes long."""

from __future__ import annotations

import os

import pytest
from support.other_users import OTHERS, as_nobody

from composer3d.cli import main
from composer3d.processes import file_objection, folder_objection
from composer3d.runner.weights import weight_export

LONG = "x" * 300


@pytest.mark.parametrize("target", [".", "sub", "sub/.."])
def test_init_writes_into_a_folder(tmp_path, monkeypatch, capsys, target):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["init", "quickstart", "--to", target]) == 0
    assert (tmp_path / target / "quickstart.toml").is_file() and (
        tmp_path / target / "composer3d.schema.json"
    ).is_file()
    assert capsys.readouterr().out.startswith("wrote ")
    assert main(["init", "quickstart", "--to", target]) == 2
    assert "quickstart.toml exists and is not overwritten; name another file with --to FILE" in capsys.readouterr().err


def test_init_of_a_schema_that_cannot_be_written_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "composer3d.schema.json").mkdir()
    assert main(["init", "quickstart"]) == 2
    assert capsys.readouterr().err == "composer3d.schema.json cannot be written: is a directory\n"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("/proc/x", "/proc/x cannot be written: no such file or directory; name another place with --to"),
        ("/proc/x.safetensors", "/proc/x.safetensors cannot be written: no such file or directory; name another place"),
        ("file/below", "file/below: file/below is no folder and cannot be made one; name another place with --to"),
        (f"{LONG}/y", f"{LONG}/y cannot be written: file name too long; name another place with --to"),
        (f"{'x' * 240}.safetensors", ".safetensors cannot be written: file name too long; name another place"),
    ],
    ids=["no files", "no file", "a file above", "long", "long beside"],
)
def test_an_export_that_cannot_be_written_says_so(tmp_path, monkeypatch, target, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(weight_export.CheckpointError) as raised:
        weight_export._places(weight_export.Path(target), 1, 8)
    assert reason in str(raised.value)


COMMANDS = {
    "tune": "tune quickstart --nproc-per-node 2 --hardware h100 --output {file}",
    "plan": "plan quickstart --html {file}",
    "schedule": "schedule quickstart --svg {file}",
    "timeline": "timeline . --html {file}",
    "timeline svg": "timeline . --svg {file}",
    "calibrate": "calibrate --output {file}",
    "selftest": "selftest --output {file}",
    "export": "export quickstart --to deepspeed --output {file}",
    "import": "import any.json --output {file}",
    "suggest": "suggest quickstart --world-size 2 --write {file}",
    "import checkpoint": "import any --to {file}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_could_not_be_written_at_the_end_is_refused_at_the_beginning(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    started = []
    for work in (
        "composer3d.planning.tune_on_machine",
        "composer3d.plan",
        "composer3d.planning.schedule",
        "composer3d.diagnostics.timeline.read_trace",
        "composer3d.planning.hardware.measure_machine",
        "composer3d.selftest.self_test",
        "composer3d.exporting.export_config",
        "composer3d.import_config",
        "composer3d.suggest",
        "composer3d.importing.foreign_checkpoints.import_checkpoint",
    ):
        monkeypatch.setattr(work, lambda *_, work=work, **__: started.append(work) or 1 / 0)
    assert main(COMMANDS[name].format(file="/proc/none/file").split()) == 2
    assert started == []
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "/proc/none/file: cannot be written: No such file or directory\n")


@pytest.mark.parametrize("name", ["plan", "schedule", "timeline", "timeline svg", "calibrate"])
def test_a_file_of_another_kind_is_refused_at_the_beginning(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("composer3d = 1\n")
    assert main(COMMANDS[name].format(file="mine").split()) == 2
    assert capsys.readouterr().err == "mine exists, holds something else and is not overwritten; name another file\n"
    assert (tmp_path / "mine").read_text() == "composer3d = 1\n"


def test_a_plugins_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "below"
    assert main(["new-plugin", "some_clip", "--family", "precision", "--to", str(target)]) == 2
    assert f"{target} cannot be made: not a directory; name another folder with --to" in capsys.readouterr().err


def test_a_probe_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "there").write_text("text")
    assert file_objection(tmp_path / "there") is None and (tmp_path / "there").read_text() == "text"
    assert file_objection(tmp_path / "new") is None and folder_objection(tmp_path / "a" / "b") is None
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert file_objection(tmp_path / "link") is None
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]
    assert file_objection(tmp_path) == "Is a directory"
    assert folder_objection(tmp_path / "there") is not None
    assert folder_objection(tmp_path / "there" / "below") == "Not a directory"
    assert folder_objection(tmp_path / "made" / LONG) == "File name too long"
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]


@OTHERS
def test_a_probe_says_what_a_user_may_not_do(tmp_path):
    for above in (tmp_path, *tmp_path.parents[:-1]):
        if above.stat().st_uid == os.getuid():
            above.chmod(above.stat().st_mode | 0o055)
    (tmp_path / "mine").write_text("text")
    (tmp_path / "mine").chmod(0o644)

    def look():
        assert file_objection(tmp_path / "mine") == file_objection(tmp_path / "new") == "Permission denied"
        assert folder_objection(tmp_path) == folder_objection(tmp_path / "new") == "Permission denied"

    as_nobody(look)
