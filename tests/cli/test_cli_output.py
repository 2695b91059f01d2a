from __future__ import annotations

import argparse
import sys

import pytest

from composer3d.checking.fqn_ranges import compress
from composer3d.cli.options import size
from composer3d.cli.output import print_problems, print_table, write_output
from composer3d.errors import ComposerError, Problem


@pytest.mark.parametrize(
    ("fqns", "text"),
    [
        ([f"layers.{i}" for i in range(32)], "layers.[0-31]"),
        (["layers.0", "layers.2", "layers.3", "layers.7"], "layers.[0,2-3,7]"),
        (["layers.5"], "layers.5"),
        ([""], "(root)"),
        (["layers.0.wq", "head", "layers.1.wq", ""], "layers.[0-1].wq, head, (root)"),
        ([f"layers.{i}.experts.{j}.w" for i in (1, 2) for j in range(8)], "layers.[1-2].experts.[0-7].w"),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], "a.0.b.[0-1], a.1.b.0"),
        (["conv2d.0", "conv2d.1", "mlp3"], "conv2d.[0-1], mlp3"),
        (["0", "1", "2"], "[0-2]"),
        ([], ""),
    ],
)
def test_numbered_names_are_shown_together(fqns, text):
    assert compress(fqns) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("5GiB", 5 * 2**30), ("500MB", 500 * 10**6), ("1.5 kB", 1500), ("7", 7), ("2 TiB", 2**41)]
)
def test_sizes(text, num_bytes):
    assert size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "5 G i B", "-1", "1e3", "0", "0.2B"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


def test_problems_are_lines_with_their_number_below(capsys):
    error, warning = (
        Problem(message="is wrong", file="a.toml", line=1, column=2),
        Problem(message="is odd", severity="warning", hint="look"),
    )
    print_problems([error, error, warning])
    assert capsys.readouterr().err == (
        "a.toml:1:2: is wrong\na.toml:1:2: is wrong\nwarning: is odd; look\n2 problems, 1 warning\n"
    )
    print_problems([warning])
    assert capsys.readouterr().err == "warning: is odd; look\n1 warning\n"


def test_tables_are_aligned_text_where_there_is_no_terminal(capsys):
    print_table(("name", "what"), [("a", "[bold]x"), ("longer", "")])
    assert capsys.readouterr().out == "name    what\na       [bold]x\nlonger\n"


def test_tables_are_drawn_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    print_table(("name", "what"), [("a", "[bold]x")])
    told = capsys.readouterr().out
    assert "[bold]x" in told and len(told.splitlines()) == 5


def test_a_drawing_replaces_an_earlier_one_and_nothing_else(tmp_path):
    page, text = tmp_path / "plan.html", "<!doctype html>\n<p>new"
    for before in (None, "", "<!DOCTYPE html>\n<p>old"):
        if before is not None:
            page.write_text(before)
        write_output(page, text)
        assert page.read_text() == text
    page.write_text("composer3d = 1\n")
    with pytest.raises(ComposerError, match="plan.html exists, holds something else and is not overwritten"):
        write_output(page, text)
    assert page.read_text() == "composer3d = 1\n"


def test_a_table_on_a_narrow_terminal_is_a_line_for_each_cell(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "28")
    print_table(("plugin", "family", "devices"), [("one", "sharding", "a text that is longer than lines")])
    assert capsys.readouterr().out == ("one\n  family: sharding\n  devices: a text that is\n    longer than lines\n")
