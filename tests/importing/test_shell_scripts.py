"""Launch scripts, read and never run: variables, conditions, and what is left open."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest

from composer3d.errors import ManifestError
from composer3d.importing.importer import read_translation
from composer3d.importing.shell_scripts import ShellScript
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
    "comments": "A=1 # A=2\n# A=3\necho $A a#b",
    "redirections": "echo --seed 1 2>&1 > /dev/stdout",
    "export": "export A=1 B=2\ndeclare C=3\necho $A $B $C",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_the_shell(name):
    script = SCRIPTS[name]
    bash = shutil.which("bash")
    assert bash is not None
    said = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True).stdout
    words = [word for command in ShellScript(text=script).commands if command[0][0] == "echo" for word, _ in command]
    assert " ".join(words[1:]).split() == said.split()


def test_what_is_not_known_keeps_its_name():
    text = "A=$(date)\nif [ -f x ]; then B=1; fi\nfor i in 1 2; do C=$i; done\necho --a $A --b $B --c $C --d $OUTSIDE"
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
    assert script.conditional == {"B": 2, "C": 3}
    assert ShellScript(text=text, values={"B": "7"}).commands[-1][4] == ("7", 1)


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
    assert said in found and time.process_time() - before < 2
