"""Code that a manifest names and that hangs, or ends the process: named with its line, by the commands that run it."""

from __future__ import annotations

import pytest

from composer3d.cli import main
from composer3d.processes import foreign_code

CODE = """
import os, time

def leaves(vocab_size):
    os._exit(7)

def aborts(step, steps):
    os.abort()

def hangs(step, steps):
    time.sleep(1e6)

def spins(vocab_size):
    while True:
        pass

def raises(step, steps):
    raise KeyError(step)

def words(step, steps):
    return "fast"

def infinite(step, steps):
    return float("inf") if step else 1.0

def loss(output, target):
    os.abort()

def unknown(output, target):
    return output.max()

class Data:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        os._exit(3)
"""
MODEL = 'use = "cli_models:build"'
SCHEDULE = '[lr_schedule]\nuse = "{}"\n'
CASES = {
    "import that hangs": (
        (MODEL, 'use = "sleeping:build"'),
        '7:1: [model] "sleeping:build" had not come to an end after 2 s when it was imported',
    ),
    "import that ends the process": (
        (MODEL, 'use = "leaving:build"'),
        '7:1: [model] "leaving:build" ended the process, which ended with exit code 9, when it was imported',
    ),
    "model that ends the process": (
        (MODEL, 'use = "dangerous:leaves"'),
        '7:1: [model] "dangerous:leaves" ended the process, which ended with exit code 7, when it was called',
    ),
    "model that hangs": (
        (MODEL, 'use = "dangerous:spins"'),
        '7:1: [model] "dangerous:spins" had not come to an end after 2 s when it was called',
    ),
    "builtin schedule": (
        ("[sharding.fsdp2]\n", "[sharding.fsdp2]\n" + SCHEDULE.format("os:abort")),
        '17:1: [lr_schedule] "os:abort" is built into Python; name a function of (step, steps) that returns the '
        "multiple",
    ),
    "schedule that aborts": (
        ("[sharding.fsdp2]\n", "[sharding.fsdp2]\n" + SCHEDULE.format("dangerous:aborts")),
        '17:1: [lr_schedule] "dangerous:aborts" ended the process, which was killed by SIGABRT, when it was called',
    ),
    "schedule that hangs": (
        ("[sharding.fsdp2]\n", "[sharding.fsdp2]\n" + SCHEDULE.format("dangerous:hangs")),
        '17:1: [lr_schedule] "dangerous:hangs" had not come to an end after 2 s when it was called',
    ),
    "schedule that raises": (
        ("[sharding.fsdp2]\n", "[sharding.fsdp2]\n" + SCHEDULE.format("dangerous:raises")),
        '17:1: [lr_schedule] "dangerous:raises" fails for step 0 of 2: KeyError: 0; it is called with (step, steps), '
        "and args by name, and returns the multiple of the rate, a number",
    ),
    "schedule of words": (
        ("[sharding.fsdp2]\n", "[sharding.fsdp2]\n" + SCHEDULE.format("dangerous:words")),
        '17:1: [lr_schedule] "dangerous:words" fails for step 0 of 2: ValueError: could not convert string to float: '
        "'fast'; it is called with (step, steps), and args by name, and returns the multiple of the rate, a number",
    ),
    "schedule without bounds": (
        ("[sharding.fsdp2]\n", "[sharding.fsdp2]\n" + SCHEDULE.format("dangerous:infinite")),
        '17:1: [lr_schedule] "dangerous:infinite" is inf for step 1 of 2, not a number',
    ),
    "builtin metric": (
        ("[sharding.fsdp2]\n", '[sharding.fsdp2]\n[evaluation]\nevery = 1\nmetrics = { own = "os:abort" }\n'),
        '18:13: [evaluation.metrics] "os:abort" is built into Python; name a function of the model\'s output and the '
        "targets",
    ),
    "loss that aborts": (
        ("steps = 2\n", 'steps = 2\nloss = "dangerous:loss"\n'),
        '14:1: [train] "dangerous:loss" ended the process, which was killed by SIGABRT, when it was called, with the '
        "first samples",
    ),
    "loss of no known reduction": (
        ("steps = 2\n", 'steps = 2\nloss = "dangerous:unknown"\n'),
        "14:1: [train] cannot tell whether the loss is a sum or a mean (its last operation is MaxBackward1); pass",
    ),
    "data that end the process": (
        ('use = "text.txt"', 'use = "dangerous:Data"\nvocab_size = 8'),
        '10:1: [data] "dangerous:Data" ended the process, which ended with exit code 3, when it was called, with the '
        "first samples",
    ),
}


@pytest.fixture
def dangerous(folder, monkeypatch):
    (folder / "dangerous.py").write_text(CODE)
    (folder / "sleeping.py").write_text("import time\ntime.sleep(1e6)\n")
    (folder / "leaving.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.setattr(foreign_code.running.__wrapped__, "__kwdefaults__", {"limit_s": 2.0})
    return folder


@pytest.mark.parametrize("name", CASES)
def test_code_that_hangs_or_ends_the_process_is_named(name, dangerous, edited, command):
    (old, new), message = CASES[name]
    edited(old, new)
    code, out, err = command("check", "run.toml")
    assert (code, out) == (2, "") and err.startswith(f"run.toml:{message}"), err


@pytest.mark.parametrize("verb", ["run", "verify"])
def test_other_commands_name_it_too(verb, dangerous, edited, command):
    edited(MODEL, 'use = "dangerous:leaves"')
    code, _, err = command(verb, "run.toml")
    assert code == 2 and err.startswith(f"run.toml:{CASES['model that ends the process'][1]}"), err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model that hangs", ("plan", "run.toml")),
        ("model that ends the process", ("plan", "run.toml", "--diff", "quickstart")),
        ("model that ends the process", ("plan", "quickstart", "run.toml")),
        ("model that ends the process", ("suggest", "run.toml", "--world-size", "2")),
        ("model that ends the process", ("schedule", "run.toml")),
        ("model that ends the process", ("tune", "run.toml", "--nproc-per-node", "2", "--hardware", "h100")),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else None,
)
def test_commands_that_build_the_model_name_it_too(name, words, dangerous, edited, command):
    (old, new), message = CASES[name]
    edited(old, new)
    assert command(*words) == (2, "", f"run.toml:{message}\n1 problem\n")


RAISING = """
import torch
import cli_models

class Model(cli_models.Model):
    def forward(self, x):
        return self.embedding(x) @ torch.ones(3)

class Traced(cli_models.Model):
    def forward(self, x):
        if type(x) is not torch.Tensor:
            raise KeyError("a tensor of another kind")
        return super().forward(x)

def build(*, vocab_size):
    return Model(8, 3, vocab_size)

def traced(*, vocab_size):
    return Traced(8, 3, vocab_size)
"""


def test_a_forward_that_raises_is_told_as_check_tells_it(folder, edited, command):
    (folder / "raising.py").write_text(RAISING)
    edited(MODEL, 'use = "raising:build"')
    told = command("check", "run.toml")
    assert told[0] == 2 and told[2].startswith("run.toml:7:1: [model] its forward fails on the first samples: Runtime")
    assert command("plan", "run.toml") == told


@pytest.mark.parametrize("words", [("plan", "run.toml"), ("suggest", "run.toml", "--world-size", "2")])
def test_what_a_model_raises_in_a_trace_alone_is_told_with_its_line(folder, edited, command, words):
    (folder / "raising.py").write_text(RAISING)
    edited(MODEL, 'use = "raising:traced"')
    assert command("check", "run.toml")[0] == 0
    code, out, err = command(*words)
    message = "a step of it cannot be traced: KeyError: 'a tensor of another kind', at raising.py:12; a step is traced"
    assert (code, out) == (2, "") and f"run.toml:7:1: [model] {message}" in err and "Traceback" not in err, err


def test_what_a_module_prints_is_no_part_of_the_answer(folder, edited, capfd):
    (folder / "loud.py").write_text("print('imported')\nfrom cli_models import *\nprint('again')\n")
    edited(MODEL, 'use = "loud:build"')
    assert main(["check", "run.toml", "--json"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("{") and "imported\nagain\n" in err


def test_a_model_that_closes_the_output_is_checked(folder, edited, capfd):
    (folder / "closing.py").write_text(
        "import sys\nimport cli_models\n\n"
        "def build(vocab_size):\n    sys.stdout.close()\n    return cli_models.build(vocab_size=vocab_size)\n"
    )
    edited(MODEL, 'use = "closing:build"')
    assert main(["check", "run.toml"]) == 0
    out, err = capfd.readouterr()
    assert "fsdp2" in out and err == ""
