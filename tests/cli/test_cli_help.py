from __future__ import annotations

import re
import subprocess
import sys

import pytest

from composer3d.cli import COMMANDS, build_parser, main

NAMES = (
    "run",
    "check",
    "plan",
    "suggest",
    "tune",
    "calibrate",
    "verify",
    "launch",
    "schedule",
    "timeline",
    "doctor",
    "selftest",
    "plugins",
    "schema",
    "init",
    "export",
    "import",
    "new-plugin",
    "completion",
)
HEAVY = ("torch", "pydantic", "numpy", "rich", "pluggy", "tomli")

WATCHED = """
import sys
from composer3d.cli import main
for command in {commands!r}:
    sys.argv = ["composer3d", *command, "--help"]
    assert main() == 0
assert main(["check"]) == 2
print("heavy:", sorted({heavy!r} & {{name.split(".")[0] for name in sys.modules}}))
"""


def test_help_imports_neither_torch_nor_anything_heavy():
    commands = [[], *([name] for name in NAMES)]
    script = WATCHED.format(commands=commands, heavy=set(HEAVY))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy: []\n")
    assert done.stdout.count("usage: composer3d") == 1 + len(NAMES)


def test_every_command_has_help_and_is_listed():
    usage = build_parser().format_help()
    assert all(re.search(rf"\n    {name}\s", usage) for name in NAMES)
    assert len(COMMANDS) == len(NAMES)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "composer3d: error: the following arguments are required: COMMAND"),
        (["chekc", "x"], 'there is no command "chekc"; did you mean "check"?'),
        (["run", "x", "--resume=--"], '--resume=--: "--" is no value; --resume expects one'),
        (["check", "x", "--set=--"], '--set=--: "--" is no value; --set expects one'),
        (["check"], "composer3d check: error: the following arguments are required: MANIFEST"),
        (
            ["suggest", "x", "--world_size", "8"],
            'composer3d suggest: error: there is no option "--world_size"; did you mean "--world-size"?',
        ),
        (["--verson"], 'composer3d: error: there is no option "--verson"; did you mean "--version"?'),
        (
            ["check", "x", "--world-size", "0"],
            'composer3d check: error: argument --world-size: "0" is not a whole number of at least 1',
        ),
        (
            ["check", "x", "--rank", "-1"],
            'composer3d check: error: argument --rank: "-1" is not a whole number of at least 0',
        ),
        (["plan", "x", "--tokens", "-3"], 'argument --tokens: "-3" is not a number above 0, such as 2000'),
        (["plan", "x", "--samples", "1e400"], 'argument --samples: "1e400" is not a number above 0'),
        (["plan", "x", "--memory", "80"], 'argument --memory: "80" has no unit; write for example 80GiB'),
        (
            ["export", "x", "--to", "y", "--max-shard", "5 boxes"],
            'composer3d export: error: argument --max-shard: "5 boxes" is not a size; write for example 5GiB or 500MB',
        ),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments, told, capsys):
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_what_a_plugin_raises_is_told_with_its_line(folder, command):
    (folder / "broken_plugin.py").write_text(
        "from composer3d import hookimpl, plugin\n"
        "@plugin(family='profiling')\n"
        "class Broken:\n"
        "    @hookimpl\n"
        "    def composer3d_configure(self, context):\n"
        "        return 1 / 0\n"
    )
    (folder / "run.toml").write_text(
        (folder / "run.toml").read_text() + '[profiling.broken]\nuse = "broken_plugin:Broken"\n'
    )
    code, _, told = command("check", "run.toml")
    said = (
        f"composer3d_configure of broken raised ZeroDivisionError: division by zero, at {folder / 'broken_plugin.py'}:6"
    )
    assert (code, told) == (
        2,
        f"run.toml:16:12: [profiling.broken] {said}\n1 problem\n",
    )
