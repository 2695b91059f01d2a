"""Edits of variables in launch scripts: what the shell makes of them, and no flags are lost where it is not known."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest

from composer3d.importing.launch_scripts.shell_edits import edit_of
from composer3d.importing.launch_scripts.shell_flags import read_script
from composer3d.importing.launch_scripts.shell_scripts import ShellScript

TEXT = "--fp16 --lr 1e-4 --name a/b.c/d.json"
EDITS = [
    "V/--fp16/--bf16",
    "V/1e-?/$W",
    "V//--/++",
    "V/#--fp16/--x",
    "V/#--lr/--x",
    "V/%.json/.toml",
    "V/%json/x",
    "V/a*c/Q",
    "V/[0-9]e/3e",
    "V//[!a-z]/_",
    "V/--fp16",
    "V/\\//X",
    "V#*--",
    "V##*/",
    "V%/*",
    "V%%/*",
    "V#no",
    "V^^",
    "V,,",
    "W^",
    "U,",
    "V:3:4",
    "V:7",
    "V: -4",
    "V:2:-3",
    "A[1]",
    "A[0]",
    "A[7]",
]


@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_those_of_the_shell(edit):
    script = f'V="{TEXT}"; W=word; U=UPPER; A=(x "y z" w)\necho ${{{edit}}} end'
    bash = shutil.which("bash")
    assert bash is not None
    said = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True).stdout
    (echoed,) = [command[1:] for command in ShellScript(text=script).commands if command[0][0] == "echo"]
    assert " ".join(word for word, _ in echoed).split() == said.split()


def test_flags_of_an_edited_variable_keep_their_lines():
    script = 'A="--fp16 \\\n  --lr 1e-4 \\\n  --seed 3"\nif true; then A="${A/--fp16/--bf16}"; fi\npython t.py $A\n'
    leaves = read_script(script, "run.sh", {}).leaves
    assert {key: (leaf.value, leaf.line) for key, leaf in leaves.items()} == {
        "bf16": (True, 1),
        "lr": (1e-4, 2),
        "seed": (3, 3),
    }


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes 2 t.py ${ARGS@Q} --x 1 --y 2",
        "torchrun --nnodes 2 t.py --x 1 ${REST//a*b*c*d*e/f} --y 2",
        "torchrun --nnodes 2 t.py --flag ${ARGS@Q} --y 2",
        'ALL="--y 2 ${ARGS@Q} --x 1"; torchrun --nnodes 2 t.py $ALL',
    ],
)
def test_flags_that_are_not_followed_are_not_lost(command):
    script = f'ARGS="--lr 1 --bf16 --seed 4"; REST="--a b"\n{command}\n'
    tree = read_script(script, "run.sh", {})
    assert "lr" not in tree.leaves and tree.leaves["nnodes"].value == 2
    (problem,) = tree.problems
    assert problem.severity == "error" and problem.line == 2
    assert problem.message.endswith("is not followed, so the flags in it are not known")


@pytest.mark.parametrize("folder", ['$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', "`pwd`", "$HOME"])
@pytest.mark.parametrize(
    "command", ['torchrun --standalone "$ROOT/t.py" {}', 'srun -l sh -c "python -u ${{ROOT}}/t.py {}"']
)
def test_a_program_in_a_folder_that_is_not_known_is_no_flags(folder, command):
    script = f"ROOT={folder}\n{command.format('--lr 1 --bf16 --seed 4')}\n"
    tree = read_script(script, "run.sh", {})
    assert not tree.problems and {"lr", "bf16", "seed"} <= tree.leaves.keys() <= {"lr", "bf16", "seed", "standalone"}


def test_paths_behind_a_variable_are_values():
    script = "torchrun t.py --data-path 0.5 $DATA/a 0.5 ${DATA}/b --load $HOME/x ${HOME}/y\n"
    tree = read_script(script, "run.sh", {})
    assert tree.leaves["data_path"].value == [0.5, "$DATA/a", 0.5, "${DATA}/b"] and not tree.problems


@pytest.mark.parametrize(
    "edit", ["V/" + "*a" * 60 + "/b", "V##" + "*a" * 60, "V//*a*a*a*b/c", "V%%*a*a*a*b", "V: 1:" + "9" * 99]
)
def test_patterns_that_take_long_are_left_open(edit):
    began = time.monotonic()
    read_script(f"V={'a' * 100_000}\npython t.py --x 1 --y 2 ${{{edit}}}\n", "run.sh", {})
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("operator", "text"),
    [("/x*y*z/q", "xy" * 10_000), ("/$P/q", "xy" * 10_000), ("##*x*y*z", "xy" * 500), ("%%x*y*z*", "xy" * 500)],
)
def test_a_text_in_which_a_pattern_is_looked_for_without_end_is_not_edited(operator, text):
    edit = edit_of(operator, lambda stated: stated.replace("$P", "x*y*z"))
    assert edit is not None and edit(text) is None
