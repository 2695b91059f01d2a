"""Completion of command lines: the candidates of every kind of word, and the scripts that ask for them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d.cli import build_parser
from composer3d.cli.completion import SCRIPTS, candidates
from composer3d.examples import shipped_examples
from composer3d.manifest import shipped


def found(line):
    return candidates(line, build_parser().parse_args(["completion", "bash"]).commands)


def words(*line):
    return [word for word, _ in found(line)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["ver"], ["verify"]),
        (["--v"], ["--version"]),
        (["check", "--str"], ["--strict"]),
        (["check", "run.toml", "--strict", "--st"], []),
        (["init", "own"], ["own-model"]),
        (["plugins", "tensor_"], ["tensor_parallel"]),
        (["new-plugin", "mine", "--family", "p"], ["precision", "profiling"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["verify", "quickstart", "--steps", ""], []),
        (["nonsense", ""], []),
        (["schema", ""], []),
    ],
)
def test_candidates(line, expected):
    assert words(*line) == expected


def test_manifests_are_shipped_ones_and_files(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "x.toml").write_text("")
    assert words("check", "") == [*sorted(shipped()), "inner/", "run.toml"]
    assert words("check", "--strict", "ru") == ["run.toml"]
    assert words("check", "inner/") == ["inner/x.toml"]
    assert words("plan", "run.toml", "--html", "cli_") == ["cli_models.py"]
    assert set(words("init", "")) == {*shipped(), *shipped_examples()}
    assert words("check", "no/such/") == []


def test_what_a_candidate_is():
    assert dict(found(["ver"]))["verify"].startswith("prove that")


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts_are_printed(shell, command):
    assert command("completion", shell) == (0, f"{SCRIPTS[shell]}\n", "")


def test_without_a_shell_it_says_where_each_goes(command):
    code, out, err = command("completion")
    assert (code, out) == (2, "")
    assert all(shell in err for shell in SCRIPTS)
    assert command("completion", "tcsh")[0] == 2


@pytest.mark.parametrize(
    ("line", "reply"),
    [("composer3d pl", "plan plugins"), ("composer3d run --no-res", ""), ("composer3d check ru", "run.toml")],
)
def test_bash_completes(line, reply, folder):
    bash = shutil.which("bash")
    assert bash is not None, "the scripts of jobs need it too"
    path = f"{Path(sys.executable).parent}"
    script = (
        f'PATH="{path}:$PATH"\n{SCRIPTS["bash"]}\nread -r -a COMP_WORDS <<< "{line}"\n'
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_composer3d\n"
        'echo "${COMPREPLY[*]}"\ncomplete -p composer3d'
    )
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=1200, check=True)
    assert done.stdout.splitlines() == [reply, "complete -F _composer3d composer3d"], done.stderr
