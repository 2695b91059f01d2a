"""Arrays, arguments, arithmetic and documents of launch scripts, beside bash; and what of them is not followed."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from support.imported import translated, verdicts_of

from composer3d.importing.launch_scripts.shell_flags import read_script
from composer3d.importing.launch_scripts.shell_scripts import ShellScript

SHAPE = """--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm
 --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0
 --attention-dropout 0 --seq-length 16 --vocab-size 64 --micro-batch-size 1 --train-iters 9 --lr 1e-3 --mock-data
""".replace("\n", " ")
SCRIPTS = {
    "last": 'L=(4 8 "1 6"); echo ${L[-2]} "${L[2]}" ${L[1+1]} x${L[7]}y; I=1; echo ${L[I]} ${L[$I]}',
    "lengths": 'L=(4 "8 9" 16); V=abc; echo ${#L[@]}2 ${#L[*]} ${#V}',
    "parts": 'L=(--a 1 --b "2 3" --c); echo "${L[@]:1}" ${L[@]:1:2} ${L[@]: -2} ${L[*]:9}',
    "removed": "L=(a b c d); unset 'L[1]'; echo ${L[@]} ${#L[@]} ${L[2]} x${L[1]}x ${L[@]:1}; L+=(e); echo ${L[4]}",
    "set": "L=(a b c); L[1]=x; L[5]=y; L[-1]=z; echo ${L[@]} ${#L[@]} ${L[5]}; M[0]=q; M[2]=r; echo ${M[@]:1}",
    "edited": 'L=(--a x/1.bin --b y.bin); echo ${L[@]%.bin} "${L[@]/x/z}"',
    "indirect": "TWO=2; V=TWO; echo ${!V}",
    "bases": "N=010; H=0x1F; echo $((0x10)) $((010)) $((10#08)) $((2#101)) $((N + H))",
    "towards zero": "echo $((-7 / 2)) $((-7 % 3)) $((2**5)) $((1 << 4))",
    "shifted": 'f() { A=$1; shift 2; echo $A $1 $# "$@"; shift; echo $# $1; }; f 1 2 3 "4 5"',
    "loops": 'for kv in a:1 "b c:2"; do A+=("--${kv%%:*}" "${kv#*:}"); done; echo "${A[@]}" $kv',
    "over arrays": 'S=; L=(1 2)\nfor n in "${L[@]}"; do\n  if [ $n = 2 ]; then S="$S --x $n"; fi\ndone; echo $S $n',
    "loops in loops": 'for a in 1 2; do for b in x "$a"; do S+=" $a$b"; done; done; for n in; do S=0; done; echo $S',
    "read": 'IFS=, read -r A B C <<< "0.1,0.2,0.3,4"; read X Y <<< "1  2 3"; echo $A $B $C $X $Y',
    "read an array": 'IFS=: read -ra L <<< "a:b c:d"; echo ${#L[@]} ${L[1]}',
    "read a document": "N=3\nread -r -d '' A <<EOF\n--a $N\n  --b x\nEOF\necho $A",
    "read a literal document": "read -d '' B <<'EOF' || true\n--c $N \\\n--d\nEOF\necho $B",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    said = subprocess.run([bash, "-c", SCRIPTS[name]], capture_output=True, text=True, check=True).stdout
    echoed = [command[1:] for command in ShellScript(text=SCRIPTS[name]).commands if command[0][0] == "echo"]
    assert " ".join(word for command in echoed for word, _ in command).split() == said.split()


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("1 2", "A=$n; [ $n = 1 ] && break"),
        ("1 2", "A=$n; torchrun t.py --lr $n --seed 4"),
        ("$LIST", "A=$n"),
        ("*.json", "A=$n"),
        ("{1..3}", "A=$n"),
    ],
)
def test_a_loop_of_which_not_all_is_known_leaves_its_variables_open(words: str, body: str) -> None:
    leaves = read_script(f"for n in {words}; do {body}; done\npython t.py --x $A --y 1 --z 2\n", "r.sh", {}).leaves
    assert "$" in str(leaves["x"].value)


def test_arguments_of_the_script_are_shifted() -> None:
    text = 'A=$1; shift; B=$1; shift 2\npython t.py --seed $A --steps $B --save ${1:-x} --rest "$#" --more $2\n'
    leaves = read_script(text, "run.sh", {"1": "4", "2": "3"}).leaves
    assert {key: leaf.value for key, leaf in leaves.items()} == {
        "seed": 4,
        "steps": 3,
        "save": "x",
        "rest": "$#",
        "more": "$5",
    }


@pytest.mark.parametrize(
    ("before", "value", "hint"),
    [
        ("shift", "$1", "--arg 2=VALUE"),
        ("[ -f x ] && shift", "$1", "--arg 1=VALUE"),
        ("f() { [ -f x ] && shift; N=$1; }; f 4", "$N", None),
        ("declare -A L=([a]=4)", "${L[a]}", None),
        ("L=(1 2); for i in $MORE; do L+=($i); done", "${#L[@]}", None),
        ("", "${!OUTSIDE}", None),
        ("", "$((0x10 * N))", "--arg N=VALUE"),
        ("", "${N}0", "--arg N=VALUE"),
        ("", "${N}${M}", None),
    ],
)
def test_what_is_not_followed_is_not_known_and_no_wrong_value(tmp_path, before, value, hint) -> None:
    flags = f"--num-experts {value} --moe-router-topk 2 --moe-aux-loss-coeff 1"
    script = f"{before}\npython pretrain_gpt.py {SHAPE} {flags}\n"
    translation = translated(tmp_path, "run.sh", script, system="megatron")
    (problem,) = [each for each in translation.problems if each.severity == "error"]
    assert problem.message.startswith("num-experts = ")
    assert problem.message.endswith(" is not known without running the script")
    assert problem.hint == (hint or "import the file with -- --num-experts VALUE behind it")
    told = verdicts_of(translation)
    assert told["moe_router_topk"] == told["moe_aux_loss_coeff"] == "missing"
    assert translation.verdicts["moe_router_topk"].note == "num-experts decides, and is not known"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("O='--num-experts 8 --moe-router-topk 3'\n", '"--num-experts 8 --moe-router-topk 3" is one word there'),
        ("O=--num-experts\\ 8\n", '"--num-experts 8" is one word there'),
    ],
)
def test_flags_that_quotes_keep_together_are_an_error(flags: str, message: str) -> None:
    (problem,) = read_script(f'{flags}python t.py --seed 1 --steps 2 "$O"\n', "run.sh", {}).problems
    assert problem.severity == "error" and problem.message.startswith(message)
    leaves = read_script(f"{flags}python t.py --seed 1 --steps 2 $O\n", "run.sh", {}).leaves
    assert leaves["num_experts"].value == 8


@pytest.mark.parametrize("value", ["$O", "\"'1e-2'\"", '"\\"1e-2\\""'])
def test_quotes_that_the_program_is_given_are_of_the_value(tmp_path, value: str) -> None:
    script = f"O=\"'1e-2'\"\npython pretrain_gpt.py {SHAPE} --num-experts 4 --moe-z-loss-coeff {value}\n"
    (problem,) = translated(tmp_path, "run.sh", script, system="megatron").problems
    assert problem.message.startswith("moe-z-loss-coeff = ") and problem.message.endswith("must be a number")
    again = f"bash -c \"python pretrain_gpt.py {SHAPE} --num-experts 4 --moe-z-loss-coeff '1e-2'\"\n"
    assert translated(tmp_path, "run.sh", again, system="megatron").problems == []


def test_all_elements_of_an_unknown_array_are_no_value_of_the_flag_before() -> None:
    script = "A=$(date)\npython t.py --seed 1 --steps 2 --swiglu ${A[@]:1} --bf16\n"
    tree = read_script(script, "run.sh", {})
    assert tree.leaves["swiglu"].value is True
    (problem,) = tree.problems
    assert problem.message.startswith("${A[@]:1} is not followed")


def test_what_another_flag_decides_is_not_called_meaningless(tmp_path) -> None:
    script = f"python pretrain_gpt.py {SHAPE} --tensor-model-parallel-size $TP --sequence-parallel\n"
    translation = translated(tmp_path, "run.sh", script, system="megatron")
    assert verdicts_of(translation)["sequence_parallel"] == "missing"
