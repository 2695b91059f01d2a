"""Launch scripts, read and never run: variables, conditions, and what is left open."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest
from support.imported import translated

from composer3d.errors import ManifestError
from composer3d.importing.importer import read_translation
from composer3d.importing.launch_scripts.shell_flags import read_script
from composer3d.importing.launch_scripts.shell_scripts import ShellScript
from composer3d.importing.translation import Options

SCRIPTS = {
    "defaults": 'A=${B:-4}; C="${D:-x}"; echo $A $C ${E:+no} ${A:+yes}',
    "arithmetic": "N=4\nM=$((N * (2 + 3) - 10 / 2 % 3))\necho $M $((M+N))",
    "arrays": 'X=(--a 1 # comment\n  --b "2 3"\n)\nX+=(--c)\necho "${X[@]}"',
    "quotes": 'A=\'$B\'; B="a $A"; echo "$B" \'c d\' e\\ f "\\$x"',
    "lines": 'A=" --a 1 \\\n --b 2 "\necho $A \\\n  --c',
    "conditions": 'A=2\nif [ $A -gt 1 ] && [[ "$A" != 3* ]]; then B=yes; elif true; then B=no; else B=2; fi\necho $B',
    "nested": 'A=1\nif [ -z "$A" ]; then if true; then B=1; fi; else B=2; fi; echo $B',
    "or": 'A=\nif [ -n "$A" ] || [ 3 -le 3 ]; then B=1; fi; echo $B',
    "cases": "A=seven\ncase $A in six) B=6;; seven|eight) B=7;; *) B=0;; esac\necho $B",
    "document": "cat > /dev/null <<EOF\nA=1 ' unclosed\nEOF\nA=2; echo $A",
    "function": "f() { A=9; }\nA=3\necho $A",
    "called": "f() { A+=2; local C=7; D=$C; }\nA=1; C=0; f; f\necho $A $C $D",
    "parameters": 'f() { local B=$1; shift; A="$B $@"; }; set -e\nf 3 "4 5" --q; f $A 6; echo $A',
    "returned": "f() { if [ $1 -gt 1 ]; then A=0; return 1; A=9; fi; A=1; }\nf 2 || B=1; f 1 && C=1; echo $A $B $C",
    "function in a function": "function g { A=$1$1; }; f() { g $1; B=$1; }; f 3; echo $A $B",
    "evaluated": 'A="--x 1"; eval "B=2 C=\\"$A\\""; eval echo $B $C',
    "comments": "A=1 # A=2\n# A=3\necho $A a#b",
    "lists": 'N=1; A=0\n[ "$N" -gt 1 ] && A=1\n[ $N -eq 1 ] || A=2\nfalse && A=3; true || A=4\necho $A',
    "chains": "A=0; C=0; false && A=1 || B=2; true || C=1 && D=2\n! false &&\n E=3; echo $A $B $C $D $E",
    "group": "{ false; } || F=4; { true; false; } && F=5; echo $F",
    "extended": 'A=1; C=0; [[ -z $A && 1 == 2 || "$A" == 1 ]] && B=1; [[ abc == a* ]] && C=1; echo $B $C',
    "plain": 'A=1; [ abc = "a*" ] || A=2; [ abc = abc ] && B=3; test 1 -lt 2 && C=4; echo $A $B $C',
    "numbers": "B=0; N=3; (( N > 2 )) && A=1; (( N == 2 )) && B=1; echo $A $B",
    "number": "N=3; if (( N - 3 )); then C=1; else C=2; fi; echo $C",
    "subshell": "A=1; B=0; (A=2; false) && B=1; (exit 1); echo $A $B",
    "exit": "A=1; echo $A; [ $A -eq 1 ] && exit; echo 2",
    "prefixed": "A=1; A=2 true; B=$A; echo $A $B",
    "assigned": "A=1 && B=2 || B=3; unset A; A=$A; echo $A $B",
    "redirections": "echo --seed 1 2>&1 > /dev/stdout",
    "printed": 'f() { echo "--a 1 $1"; }; X=( $(f 2) --c "$(echo d e)" `echo -n 5` ); echo "${X[@]}"',
    "printed and said": 'f() { echo "at $1" >&2; [ $1 -gt 1 ] && printf "%s " --n "$1"; }; A=$(f 2)$(f 1); echo $A',
    "printed in each other": "f() { echo $(($1 + 1)); }; N=1; M=$(f $(f $N)); (N=$(f 7)); echo $M $N",
    "documents": "N=3\nA=$(cat <<EOF\n--a $N\n  --b x --c\nEOF\n)\nB=$(cat <<'E'\n--d $N\nE\n)\necho $A $B",
    "required": "A=1; echo ${A?unset} ${A:?empty} ${@:2}",
    "continued in quotes": 'A="--a 1 \\\n  --b 2"; C="cd . && echo ${A} --c"; bash -c "$C"',
    "export": "export A=1 B=2\ndeclare C=3\necho $A $B $C",
}


@pytest.mark.parametrize("printed", ["cat flags.txt", "echo $HOME | tr a b", "f | head -1", "echo 1 > file; ls"])
def test_what_a_command_prints_is_not_known_without_running_it(printed):
    script = f"f() {{ echo --lr 1; }}\nX=( $({printed}) --seed 1 --steps 2 )\npython train.py ${{X[@]}}"
    tree = read_script(script, "run.sh", {})
    assert {key: leaf.value for key, leaf in tree.leaves.items()} == {"seed": 1, "steps": 2}
    [problem] = tree.problems
    assert problem.line == 2 and "is not run" in problem.message and problem.severity == "error"


def test_flags_of_a_scheduler_are_not_the_programs():
    script = 'O="--seed 1 --steps 2"\nsrun -l --output=logs/%x_%j.log --nodes=2 sh -c "python -u train.py $O"\n'
    direct = "srun --output=a --time 1:00 torchrun --nproc-per-node 2 train.py --seed 1 --steps 2"
    for text, more in ((script, {}), (direct, {"nproc_per_node": 2})):
        leaves = read_script(text, "run.sh", {}).leaves
        assert {key: leaf.value for key, leaf in leaves.items()} == {"seed": 1, "steps": 2, **more}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_the_shell(name):
    script = SCRIPTS[name]
    bash = shutil.which("bash")
    assert bash is not None
    said = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True).stdout
    echoed = [command[1:] for command in ShellScript(text=script).commands if command[0][0] == "echo"]
    assert " ".join(word for command in echoed for word, _ in command).split() == said.split()


def test_a_document_keeps_its_lines():
    leaves = read_script("X=$(cat <<EOF\n--lr 1\n--seed 2 --bf16\nEOF\n)\npython t.py $X\n", "run.sh", {}).leaves
    assert {key: (leaf.value, leaf.line) for key, leaf in leaves.items()} == {
        "lr": (1, 2),
        "seed": (2, 3),
        "bf16": (True, 3),
    }


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("${MBS?set it}", "--arg MBS=VALUE"),
        ("$((2 * MBS))", "--arg MBS=VALUE"),
        ("${MBS/a/b}", "--arg MBS=VALUE"),
        ("$(python sizes.py)", "import the file with -- --micro-batch-size VALUE behind it"),
        ("`sizes`", "import the file with -- --micro-batch-size VALUE behind it"),
    ],
)
def test_a_number_that_is_not_known_says_what_gives_it(tmp_path, value, hint):
    script = f"python pretrain_gpt.py --lr 1 --micro-batch-size {value}\n"
    (problem,) = translated(tmp_path, "run.sh", script, system="megatron").problems
    assert problem.message.endswith("is not known without running the script") and problem.hint == hint
    if "--arg" in hint:
        leaf = read_script(script, "run.sh", {"MBS": "4"}).leaves["micro_batch_size"]
        assert leaf.value == (8 if "2" in value else 4)


def test_what_is_not_known_keeps_its_name():
    text = "A=$(date)\nif [ -f x ]; then B=1; fi\nfor i in $MORE; do C=$i; done\necho --a $A --b $B --c $C --d $OUTSIDE"
    script = ShellScript(text=text)
    (*_, command) = script.commands
    assert command == [
        ("echo", 4),
        ("--a", 4),
        ("$(date)", 1),
        ("--b", 4),
        ("$B", 2),
        ("--c", 4),
        ("$C", 3),
        ("--d", 4),
        ("$OUTSIDE", 4),
    ]
    assert script.conditional == {"B": 2, "C": 3, "i": 3}
    assert ShellScript(text=text, values={"B": "7"}).commands[-1][4] == ("7", 1)


GUARDED = [  # that a flag is there depends on what only a run knows
    '[ -n "$X" ] && {}',
    '[ -z "$X" ] || {}',
    '[ "${{X:-}}" = 1 ] && {}',
    "[[ -n ${{X+x}} ]] && {}",
    "[[ $X == 1 && 1 == 1 ]] && {}",
    "(( X > 1 )) && {}",
    "! grep -q x file && {}",
    "test -f x &&\\\n {}",
    'if [ -n "$X" ]; then {}; fi',
    "if grep -q x y; then :; else {}; fi",
    "case $X in 1) {};; esac",
    "while read X; do {}; done",
    "for i in $MORE; do {}; done",
    "X=$(nproc); [ $X -gt 1 ] && {{ {}; }}",
]


@pytest.mark.parametrize("added", ["A+=(--clip-grad 0.3)", 'A=("${A[@]}" --clip-grad 0.3)', 'A="$A --clip-grad 0.3"'])
@pytest.mark.parametrize("guard", GUARDED)
def test_a_flag_that_depends_on_the_outside_is_reported_with_its_line(guard, added):
    text = f'A=(--num-layers 2 --bf16)\n{guard.format(added)}\ntorchrun pretrain_gpt.py "${{A[@]}}"'
    tree = read_script(text, "train.sh", {})
    (problem,) = [problem for problem in tree.problems if problem.severity == "error"]
    assert "depends on line 2, which is not known" in problem.message
    assert [leaf.value for leaf in tree.leaves.values()] == [2, True]


@pytest.mark.parametrize(
    "command",
    [
        'srun bash -c "python t.py $A"',
        "eval python t.py $A",
        'f() { python t.py $A $1; }; f "$B"',
        'C="python t.py $A"; $C',
    ],
)
def test_flags_are_found_in_commands_of_other_forms(command):
    tree = read_script(f'A="--lr 1 --heads $H --bf16"; B="--seed 3"\n{command}\n', "train.sh", {"H": "4"})
    wanted = {"lr": 1, "heads": 4, "bf16": True} | ({"seed": 3} if "$1" in command else {})
    assert {leaf.path[0]: leaf.value for leaf in tree.leaves.values()} == wanted


def test_a_function_that_calls_itself_ends():
    script = ShellScript(text="f() { A=$((A + 1)); f; }\nA=0; f; echo $A")
    assert [word for word, _ in script.commands[-1]][0] == "echo"


def test_files_that_a_script_sources_are_named():
    text = 'source ./common.sh\npython train.py --lr 1 --bf16 "${EXTRA_ARGS[@]}"'
    read, unset = read_script(text, "train.sh", {}).problems[::-1]
    assert (read.line, read.severity, read.message) == (
        1, "warning", "./common.sh is not read, so what it sets is not known here",
    )  # fmt: skip
    assert (unset.severity, unset.hint) == ("error", "--arg EXTRA_ARGS=VALUE")
    assert unset.message == "${EXTRA_ARGS[@]} is not set in this script: ./common.sh may set it, and is not read"


def test_two_conditions_are_reported_each_and_values_decide_them():
    text = 'A=(--a 1 --b)\n[ -n "$X" ] && A+=(--c)\n[ "$Y" = 1 ] && A+=(--d)\npython train.py "${A[@]}" ${Z:+--e}'
    problems = read_script(text, "train.sh", {}).problems
    assert [(problem.line, problem.hint) for problem in problems] == [
        (2, "--arg X=VALUE"),
        (3, "--arg Y=VALUE"),
        (4, "--arg Z=VALUE"),
    ]
    tree = read_script(text, "train.sh", {"X": "", "Y": "1", "Z": "yes"})
    assert not tree.problems and [path[0] for path in tree.leaves] == ["a", "b", "d", "e"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A='x\ny", "train.sh:1: ' is not closed"),
        ('\nA="x', 'train.sh:2: " is not closed'),
        ("A=(1 2", "train.sh:1: ( is not closed"),
        ("cat <<EOF\nx", "train.sh:2: the document that EOF ends has no end"),
        ("echo nothing", "no command of this script has flags"),
        ("if [ a ]; then\n" * 5000, "is nested too deeply"),
        ("A=1\n" + "A=$A$A$A\n" * 500 + "x --a $A --b", "its variables expand to too much"),
        ("$" * 50_000 + " --a 1 --b 2", ""),
    ],
)
def test_hostile_scripts_end_at_once(tmp_path, text, said):
    file = tmp_path / "train.sh"
    file.write_text(text)
    before = time.process_time()
    try:
        read_translation(file, Options())
        found = ""
    except ManifestError as error:
        found = str(error)
    assert said in found and time.process_time() - before < 20
