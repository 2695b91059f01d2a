"""`--json`: one JSON object is all that standard output has, whatever a model prints, in Python, C or by descriptor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from composer3d.checking import foreign_problems
from composer3d.cli import main

MODEL = 'use = "cli_models:build"'
PIPELINE = ("--set", "mesh.pp=2", "--set", "scheduling.pipeline={}")
SPEAKING = """
import ctypes, os
import cli_models

def speak(where):
    print(f"Python, {where}")
    os.write(1, f"a descriptor, {where}\\n".encode())
    ctypes.CDLL(None).printf(f"C, {where}\\n".encode())

class Model(cli_models.Model):
    def forward(self, x):
        speak("in the forward")
        return super().forward(x)

def build(*, vocab_size):
    speak("in the factory")
    return Model(8, 3, vocab_size)

speak("imported")
"""


@pytest.mark.parametrize(
    "words",
    [
        ("check", "run.toml"),
        ("plan", "run.toml"),
        ("suggest", "run.toml", "--world-size", "2", "--keep", "recompute", "--keep", "microbatch"),
    ],
    ids=lambda words: words[0],
)
def test_json_is_all_of_the_output_whatever_a_model_prints(words, folder, edited):
    (folder / "speaking.py").write_text(SPEAKING)
    edited(MODEL, 'use = "speaking:build"')
    command = [sys.executable, "-m", "composer3d", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["composer3d"] == 1
    for said in ("Python, imported", "a descriptor, imported", "Python, in the forward"):
        assert said in done.stderr


def test_what_is_printed_in_this_process_is_no_part_of_json(folder, edited, capfd, monkeypatch):
    (folder / "speaking.py").write_text(SPEAKING)
    edited(MODEL, 'use = "speaking:build"')
    monkeypatch.setattr(foreign_problems, "names_foreign_code", lambda *_: False)
    assert main(["schedule", "run.toml", "--json", *PIPELINE]) == 0
    print("afterwards")
    out, err = capfd.readouterr()
    text, _, rest = out.rpartition("afterwards")
    assert json.loads(text)["composer3d"] == 1 and rest == "\n"
    for said in ("Python", "a descriptor", "C"):
        assert f"{said}, in the factory" in err
