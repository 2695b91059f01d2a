"""Guided `init`: questions on a terminal, a manifest that `check` accepts, and no question in a pipe."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli

from composer3d.cli.guided_init import Answers, ask, guide, manifest_of


def answering(*answers):
    left = list(answers)

    def read(question):
        if not left:
            raise EOFError
        return left.pop(0) + "\n"

    return read


@pytest.mark.parametrize(
    ("answers", "tables"),
    [
        (["", "", "", "", ""], {"use": "composer3d.models:llama"}),
        (["cli_models:build", "text.txt", "2", "4", "mine.toml"], {"use": "cli_models:build"}),
    ],
)
def test_what_it_writes_is_accepted(answers, tables, folder, capsys):
    (folder / "run.toml").unlink()
    assert guide(answering(*answers), devices=2, device="cpu") == 0
    file = Path(answers[-1] or "run.toml")
    first, _, text = file.read_text().partition("\n")
    assert first == "#:schema composer3d.schema.json" and json.loads(Path("composer3d.schema.json").read_text())
    found = tomli.loads(text)
    assert found["model"].items() >= tables.items() and found["mesh"] == {"dp_shard": 2}
    told = capsys.readouterr().out
    assert "DATA         fsdp2" in told and told.endswith(f"next: composer3d run {file}\n")


def test_answers_that_cannot_be_are_asked_again(folder, capsys):
    answers = ["my model", "hf:", "a:B", "nowhere", "text.txt", "0", "x", "3", "", "run.txt", "run.toml", "other.toml"]
    assert ask(answering(*answers), devices=2) == Answers(
        model="a:B", data="text.txt", devices=3, steps=100, file=Path("other.toml")
    )
    told = capsys.readouterr().out
    for said in ('"my model" is no reference', '"nowhere" is neither', '"0" is not a whole', "run.toml exists"):
        assert said in told


def test_a_manifest_in_another_folder_has_its_schema_and_data(folder, capsys):
    Path("inner").mkdir()
    answers = ["", "text.txt", "2", "4", "no_such/run.toml", "inner/run.toml"]
    assert guide(answering(*answers), devices=2, device="cpu") == 0
    assert tomli.loads(Path("inner/run.toml").read_text())["data"]["use"] == "../text.txt"
    assert sorted(file.name for file in Path("inner").iterdir()) == ["composer3d.schema.json", "run.toml"]
    assert not Path("composer3d.schema.json").exists()
    assert "there is no folder no_such" in capsys.readouterr().out


def test_a_model_s_folder_is_seen_from_the_manifest(folder):
    Path("inner").mkdir()
    Path("own").mkdir()
    found = ask(answering("hf:own", "", "", "", "inner/run.toml"), devices=2)
    assert (found.model, found.data) == ("hf:../own", "")
    assert ask(answering("hf:a/b", "", "", "", "inner/run.toml"), devices=2).model == "hf:a/b"


def test_what_check_finds_is_told_and_the_file_stays(folder, capsys):
    answers = ["cli_models:no_such", "text.txt", "2", "4", "mine.toml"]
    assert guide(answering(*answers), devices=2, device="cpu") == 2
    told = capsys.readouterr()
    assert 'module "cli_models" has no "no_such"' in told.err
    assert "mend mine.toml" in told.out and (folder / "mine.toml").is_file()
    assert (folder / "composer3d.schema.json").is_file()


def test_without_an_answer_nothing_is_written(folder, capsys):
    before = sorted(folder.iterdir())
    assert guide(answering("cli_models:build"), devices=2, device="cpu") == 2
    assert capsys.readouterr().err.endswith("nothing is written\n")
    assert sorted(folder.iterdir()) == before


def test_hugging_face_models_have_their_key():
    answers = Answers(model="hf:a/b", data="", devices=4, steps=7, file=Path("run.toml"))
    assert tomli.loads(manifest_of(answers, device="cuda"))["model"] == {"hf": "a/b"}


def test_a_pipe_is_asked_nothing(folder):
    code = "import sys; from composer3d.cli import main; sys.exit(main(['init']))"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0 and done.stdout.startswith("manifest ")
    assert sorted(path.name for path in folder.iterdir()) == ["cli_models.py", "run.toml", "text.txt"]


@pytest.mark.slow
def test_a_terminal_is_asked(folder):
    (folder / "run.toml").unlink()
    pid, terminal = pty.fork()
    if pid == 0:
        code = "import sys; from composer3d.cli import main; sys.exit(main(['init']))"
        os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, "COLUMNS": "40"})
    os.write(terminal, b"\n" * 5)
    told, ends = b"", time.monotonic() + 250
    while time.monotonic() < ends:
        if select.select([terminal], [], [], 1)[0]:
            try:
                told += os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, told.decode()
    assert b"Model: module:Class" in told and b"next: composer3d run run.toml" in told
    assert (folder / "run.toml").read_text().startswith("#:schema composer3d.schema.json\n")
