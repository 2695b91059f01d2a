"""Flags of a command line, or of a launch script that is read and never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from composer3d.errors import Problem
from composer3d.importing.command_lines import value_of
from composer3d.importing.launch_scripts.shell_scripts import LineWord, ShellScript
from composer3d.importing.leaves import SourceTree, TreeBuilder, UnreadableSource

__all__ = ["read_command_line", "read_script", "read_words"]

# A variable by itself: its name, and behind that what edits its text, as /a/b.
_ALONE = re.compile(r"^\$(?:(?P<plain>\w+)|\{[!#]?(?P<name>\w+)(?:\[[^\]]*\])?(?P<edit>[^\w\[][^}]*)?\})$")
_LIST = re.compile(r"^\$\{!?\w+\[[@*]\][^}]*\}$")  # all elements of an array, or some
_BLANK = re.compile(r"\s")
_GROUP = re.compile(r"ARGS|OPTIONS?|OPTS|FLAGS", re.IGNORECASE)
_SUBSTITUTED = re.compile(r"^(\$\(|`)")
_PROGRAM = re.compile(r"(?:^|/)(?:torchrun|python[\d.]*)$")
_COMMAND_LINE = "the command line"


def read_words(words: Sequence[str], tree: SourceTree | None) -> SourceTree:
    """Return the flags of a command line; beside a source they take the place of its own.

    Args:
        words: As a shell splits them.
        tree: The source.
    """
    builder = TreeBuilder(file=_COMMAND_LINE if tree is None else tree.file)
    _add(builder, [(word, 1) for word in words])
    if tree is None:
        return builder.tree(shlex.join(words))
    leaves = {**tree.leaves, **builder.leaves}
    return SourceTree(file=tree.file, leaves=leaves, problems=tree.problems, text=tree.text)


def read_command_line(text: str, file: str) -> SourceTree:
    """Read a text that holds flags alone."""
    builder = TreeBuilder(file=file)
    script = ShellScript(text=text, file=file)
    _add(builder, [word for command in script.commands for word in command])
    return builder.tree(text)


def read_script(text: str, file: str, values: Mapping[str, str]) -> SourceTree:
    """Read the flags of the command that a script starts: nothing of it is executed.

    Args:
        text: Of the script.
        file: Named in problems.
        values: Of variables, as the user gives them.

    Raises:
        UnreadableSource: A quote or a bracket is not closed, or no command has flags.
    """
    builder = TreeBuilder(file=file)
    try:
        script = ShellScript(text=text, file=file, values=values)
        words = _words_of_program(script)
    except RecursionError:
        raise UnreadableSource(Problem(message="is nested too deeply", file=file)) from None
    if _num_flags(words) < 2:
        raise UnreadableSource(Problem(message="no command of this script has flags", file=file))
    _add(builder, words, script)
    for name, line in script.sourced.items():
        message = f"{name} is not read, so what it sets is not known here"
        hint = "--arg NAME=VALUE gives a variable that it sets"
        builder.problems.append(Problem(message=message, file=file, line=line, severity="warning", hint=hint))
    for reference, line in script.uncertain.items():
        name = re.findall(r"\w+", reference)[0]
        message = f"{reference} depends on {name}, which is not known without running the script"
        hint = f"--arg {script.argument_behind(name)}=VALUE"
        severity: Literal["error", "warning"] = "error" if "--" in reference else "warning"  # a flag, or a path's part
        builder.problems.append(Problem(message=message, file=file, line=line, severity=severity, hint=hint))
    return builder.tree(text)


def _words_of_program(script: ShellScript) -> Sequence[LineWord]:
    """Return the command with most flags, or a variable that has more, where no command names it."""
    command = max(script.commands, key=_num_flags, default=[])
    variables = script.variables
    name = max(variables, key=lambda name: _num_flags(variables[name]), default=None)
    if name is None or _num_flags(variables[name]) <= _num_flags(command):
        return command
    is_named = any((found := _ALONE.match(word)) and name in found.group("plain", "name") for word, _ in command)
    return command if is_named else variables[name]


def _num_flags(words: Iterable[LineWord]) -> int:
    return sum(word.startswith("--") and len(word) > 2 for word, _ in words)


def _add(builder: TreeBuilder, words: Iterable[LineWord], script: ShellScript | None = None) -> None:
    """Add a leaf for every flag; a word that stands for further flags, and is not known, is a problem."""
    found: list[tuple[str, int, list[str]]] = []  # name, line, values
    has_program = False
    for word, place in words:
        given = found[-1][2] if found else []
        if not has_program and _PROGRAM.search(word):  # before it stand the flags of a scheduler or a container
            found.clear()
            continue
        if word.startswith("--") and len(word) > 2:
            name, stated, value = word[2:].partition("=")
            if _BLANK.search(name):
                _refuse_joined(builder, word, place)
                continue
            found.append((name, place, [value] if stated else []))
        elif word.endswith(
            ".py"
        ):  # before a program stand the flags of its launcher; its folder may be what is not run
            has_program = True
        elif _LIST.match(word) or (_ALONE.match(word) and (not found or given or _GROUP.search(word))):
            _open_group(builder, word, place, script)
        elif (not found or given) and _SUBSTITUTED.match(word):
            message, hint = f"{word} is not run, so the flags that it prints are not known", "import the flags after --"
            builder.problems.append(Problem(message=message, file=builder.file, line=place, hint=hint))
        else:
            given.append(word)
    for name, line, given in found:
        values = [value_of(word) for word in given] or [True]
        one_or_all = values[0] if len(values) == 1 else values
        builder.add((name.replace("-", "_"),), one_or_all, line, severity="warning", written=name)


def _refuse_joined(builder: TreeBuilder, word: str, line: int) -> None:
    shown = f"{word[:57]}..." if len(word) > 60 else word
    message = f'"{shown}" is one word there, because of its quotes: Megatron-LM has no flag of that name, and raises'
    hint = "leave the quotes out, or expand an array"
    builder.problems.append(Problem(message=message, file=builder.file, line=line, hint=hint))


def _open_group(builder: TreeBuilder, word: str, line: int, script: ShellScript | None) -> None:
    found = _ALONE.match(word)
    if script is None or found is None:
        return
    name = found["plain"] or found["name"]
    if (found["edit"] or word.startswith("${!")) and name in script.variables:
        message, hint = f"{word} is not followed, so the flags in it are not known", "import the flags after --"
        builder.problems.append(Problem(message=message, file=builder.file, line=line, hint=hint))
        return
    condition = script.condition_of(name, line)
    message = f"{word} is not set in this script, so it stands for nothing"
    if condition is not None:
        message = f"${name} depends on line {condition}, which is not known without running the script"
    hint = f"--arg {name}=VALUE" if condition is None else script.hint_of(condition)
    if condition is None and script.sourced:
        message = f"{word} is not set in this script: {', '.join(script.sourced)} may set it, and is not read"
    severity = "warning" if condition is None and not script.sourced else "error"
    builder.problems.append(
        Problem(message=message, file=builder.file, line=line, severity=severity, hint=hint)  # type: ignore[arg-type]
    )
