"""What a person sees of a run: a bar that moves on a terminal, lines where standard error is none."""

from __future__ import annotations

import gc
import os
import pty
import re
import select
import sys
import time

import pytest

from composer3d.cli import main
from composer3d.cli.output import coloured, print_table
from composer3d.processes.forking import limit_ranks
from composer3d.runner.reporting.display import Display

ARGUMENTS = ["run", "run.toml", "--set", "run.output=out", "--set", "train.steps=12"]
ROW = {"loss": 2.5, "grad_norm": 1.25, "lr": 3e-4, "tokens_per_s": 12345.0, "mfu": 0.42, "skipped_steps": 1}


def on_a_terminal(function, columns=140, **environment):
    """Run a function in a child whose streams are a terminal; return its exit code and what it wrote."""
    pid, master = pty.fork()
    if pid == 0:
        # A process group of an earlier test, collected here, would wait for threads that no fork has.
        gc.freeze()
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES="40", **environment)
        # Inside of pytest these are what captures them.
        with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
            code = function() or 0
        os._exit(code)
    written, deadline = b"", time.monotonic() + 300
    while time.monotonic() < deadline:
        if select.select([master], [], [], 1.0)[0]:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            written += piece
    os.close(master)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode()


def plain(text):
    """Return text without what moves the cursor and colours, one line for every redrawing."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


def redrawn(text):
    """Return the steps that a bar showed, in order."""
    return [int(step) for step in re.findall(r"^step +(\d+)/12 ", plain(text), re.MULTILINE)]


@pytest.fixture(autouse=True)
def _told_by_nobody(monkeypatch):
    """Leave it to what the streams are whether there is a terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_texts_are_shown_as_they_are(capsys):
    Display(12).message("training to runs/:rocket:/[red]a[/red]: 12 steps")
    assert capsys.readouterr().err == "training to runs/:rocket:/[red]a[/red]: 12 steps\n"


def steps():
    with Display(12) as display:
        for step in range(1, 13):
            display.step({**ROW, "step": step})
        display.message("between")


def test_a_bar_on_a_terminal_is_redrawn_in_place():
    code, written = on_a_terminal(steps)
    assert code == 0 and redrawn(written)[-1] == 12 and len(redrawn(written)) >= 2
    last = plain(written)[plain(written).rindex("step 12/12") :]
    assert "loss 2.5000  norm 1.250  lr 3.00e-04  12,345 tokens/s  MFU 42.0%  skipped 1" in last
    assert "\x1b[2K" in written and "between" in plain(written)  # the line is cleared before it is drawn again


@pytest.mark.parametrize("columns", [16, 24, 40, 80, 100, 119])
def test_the_step_stays_where_there_is_little_room(columns):
    code, written = on_a_terminal(steps, columns)
    assert code == 0 and redrawn(written)[-1] == 12
    assert all(len(line) <= columns for line in plain(written).split("\n"))
    assert ("loss 2.5000" in plain(written)) == (columns >= 24)


def test_verdicts_are_coloured_on_terminals_alone():
    def verdicts():
        sys.stdout.write(coloured("proven", good=True) + coloured("not proven", good=False))

    green, red = "\x1b[32mproven\x1b[0m", "\x1b[31mnot proven\x1b[0m"
    assert green + red in on_a_terminal(verdicts)[1]
    assert "provennot proven" in on_a_terminal(verdicts, NO_COLOR="1")[1]
    assert "provennot proven" in on_a_terminal(verdicts, NO_COLOR="1", FORCE_COLOR="1")[1]
    assert coloured("proven", good=True) == "proven"


def test_a_drawn_table_has_no_escapes_where_no_colour_is_wanted():
    def table():
        print_table(["name", "size"], [["a", "1"], ["b", "2"]])

    assert "\x1b[1m" in on_a_terminal(table)[1]
    assert "\x1b" not in on_a_terminal(table, NO_COLOR="1")[1]


def test_colour_is_asked_for_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert coloured("so\nand so", good=None) == "\x1b[33mso\x1b[0m\nand so"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("so", good=None) == "so"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("check", "run.toml", "--set", "model.args.vocab_size=256"), "\x1b[32mpp=1 x dp_replicate=1 x dp_shard=2"),
        (("check", "run.toml", "--set", "train.stepz=1"), "\x1b[31m1 problem\x1b[0m"),
        (("plan", "run.toml", "--memory", "1TiB"), "\x1b[32mfits [modelled]: "),
        (("plan", "run.toml", "--memory", "1KiB"), "\x1b[31mdoes not fit [modelled]: "),
        (("doctor", "."), "\x1b[31mthe run ended, and nobody wrote down why"),
    ],
    ids=["checked", "problems", "fits", "does-not-fit", "doctor"],
)
def test_every_verdict_is_coloured(arguments, line, folder, command, monkeypatch):
    (folder / "manifest.toml").write_text("composer3d = 1\n")
    plain = "".join(command(*arguments)[1:])
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = "".join(command(*arguments)[1:])
    assert line in shown and re.sub("\x1b\\[[0-9]+m", "", shown) == plain


@pytest.fixture
def started(folder):
    with limit_ranks(2):
        yield


def test_a_run_on_a_terminal_has_a_bar(started):
    code, written = on_a_terminal(lambda: main(ARGUMENTS))
    assert code == 0, written
    assert redrawn(written)[-1] == 12 and redrawn(written) == sorted(redrawn(written))
    assert "tokens/s" in written and "finished: 12 steps" in plain(written)


def test_lines_where_there_is_no_terminal(started, capfd):
    assert main(ARGUMENTS) == 0
    shown = capfd.readouterr().err
    assert re.findall(r"^step (\d+)/12  loss \d\.\d{4}  norm \S+  lr \S+  \S+ tokens/s$", shown, re.MULTILINE) == [
        "1",
        "10",
        "12",
    ]
    assert "\x1b" not in shown and "\r" not in shown


def test_lines_in_a_notebook_are_written_to_its_stream(monkeypatch, capsys):
    """Rich would show HTML by the kernel's connection, which a forked rank has not."""
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr("builtins.get_ipython", shell, raising=False)
    display = Display(3)
    display.step({**ROW, "step": 3})
    assert capsys.readouterr().err.startswith("step 3/3  loss 2.5000")
