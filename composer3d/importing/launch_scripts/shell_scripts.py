"""Launch scripts in shell, read without running them: what their variables hold, and the commands they would start.

Assignments, arrays, arithmetic, defaults (`${X:-1}`), conditions on known values (`if`, `case`, `&&`, `||`), calls of
the script's own functions, `eval`, `bash -c` and `$(...)` of these and of `echo`, `for` over known words, `shift`, and
`read` of a document in the script are followed. Other loops, other substituted commands, other files and conditions on
files or on variables set outside are not: what depends on them is open, and keeps its text (`$NAME`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from composer3d.importing.launch_scripts.shell_conditions import holds
from composer3d.importing.launch_scripts.shell_control_flow import State
from composer3d.importing.launch_scripts.shell_pieces import Piece, blank, split_pieces
from composer3d.importing.launch_scripts.shell_reading import DOCUMENT, LITERAL
from composer3d.importing.launch_scripts.shell_tokens import Token, tokens_of
from composer3d.importing.launch_scripts.shell_variables import PARAMETER, ScriptVariables, is_assignment

__all__ = ["LineWord", "ShellScript"]

LineWord: TypeAlias = tuple[str, int]

_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_OWN = ("local", "declare", "typeset")  # to a function's call
_TESTS = ("[", "[[", "test", "true", "false", ":")
_READING = ("read", "mapfile", "readarray", "getopts", "let")
_ENDS = (";", "\n", "&&", "||", "|", "&", ";;", "(", ")")
_SHELL = re.compile(r"(?:^|/)(?:ba|da|z|k)?sh$")
_MOST_CALLS = 20  # inside of each other
_MOST_SUBSTITUTED = 1_000  # of a script
# `cat <<END`, the lines behind it, and `END`; in quotes nothing in the lines is put in place.
_DOCUMENT = re.compile(r"^\s*cat\s*<<-?\s*(['\"]?)(\w+)\1[ \t]*\n(.*?)\n[ \t]*\2\s*$", re.DOTALL)
_FORMAT = re.compile(r"(?:%s|\\n|\s)*")  # of `printf`
_SILENT = ("set", "unset", "shift", "return", "exit", "cd")
_ENDING = ("break", "continue", "return", "exit", "eval", "exec", "read", "source", ".")
_STARTING = re.compile(
    r"(?:^|/)(?:torchrun|python[\d.]*|srun|sbatch|mpirun|mpiexec|deepspeed|accelerate|ssh|docker|singularity|apptainer"
    r"|(?:ba|z|da)?sh)$|\.(?:py|sh)$"
)
_PROGRAM = re.compile(r"(?:^|/)(?:torchrun|python[\d.]*)$|\.py$")


@dataclass(kw_only=True)
class ShellScript(ScriptVariables):
    """A script's commands and variables, as far as they are known.

    Attributes:
        commands: Words of every command that runs, or may run.
        sourced: Other files whose commands it runs, which are not read, with the line of each.
    """

    commands: list[list[LineWord]] = field(init=False, default_factory=list)
    sourced: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._functions: dict[str, list[Token]] = {}
        self._result: bool | None = True  # of the last `return`
        self._num_substituted = 0
        self._printed: list[Piece] | None = None  # by the commands of a `$(...)`, while these are read
        self._is_known = True  # whether they print nothing else
        self._targets: list[str] = []  # of a command's redirections
        self._read_from: tuple[str, Token] | None = None  # the last of these that is a text of the script
        super().__post_init__()

    @property
    def variables(self) -> Mapping[str, list[LineWord]]:
        """The words of every variable."""
        return {name: split_pieces(pieces) for name, pieces in self._environment.variables.items()}

    @property
    def uncertain(self) -> Mapping[str, int]:
        """Every `${NAME:+...}` whose variable is not known, with its line."""
        return self._environment.uncertain

    def argument_behind(self, name: str) -> str:
        """Return the variable of the outside, or the argument, that another is set from; else its own name."""
        return self._environment.argument_behind(name)

    def condition_of(self, name: str, line: int) -> int | None:
        """Return the line of the condition that what a variable is set to depends on; None where there is none.

        Args:
            name: Of the variable.
            line: Of the assignment.
        """
        return self._guards.get((name, line), self.conditional.get(name))

    def hint_of(self, condition: int) -> str:
        """Return how the condition of a line becomes known."""
        names = list(dict.fromkeys(re.findall(r"\$\{?(\w+)", self._tests.get(condition, ""))))
        names = [self._environment.argument_behind(name) for name in names]
        return " ".join(f"--arg {name}=VALUE" for name in names) or "import the command's flags after --"

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _words(self) -> list[Token]:
        """Return the words of a simple command, or all that `[[` encloses."""
        words: list[Token] = []
        self._targets, self._read_from = [], None
        is_extended = self._tokens[self._at].text == "[["
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if is_extended:
                self._at += 1
                words.append(token)
                is_extended = token.text != "]]"
                continue
            if token.is_operator and token.text in _ENDS:
                break
            self._at += 1
            if token.is_operator:  # a redirection, whose target follows
                for target in self._tokens[self._at : self._at + 1]:
                    self._targets.append(token.text + target.text)
                    if token.text in (DOCUMENT, LITERAL, "<<<"):
                        self._read_from = token.text, target
                self._at += 1
            else:
                words.append(token)
        return words

    def _command(self, state: State) -> None:
        words = self._words()
        self._outcome = None
        if state == "dead" or not words:
            return
        head = words[0].text
        if head in _TESTS:
            self._outcome = holds(words, self._environment)
            return
        if head in _DECLARING:
            self._outcome = True
            if head in _OWN:
                self._keep(word.text.partition("=")[0] for word in words[1:])
            words = [word for word in words if is_assignment(word.text)]
        num_assigned = next((n for n, word in enumerate(words) if not is_assignment(word.text)), len(words))
        if num_assigned == len(words):  # before a command they are that command's alone
            self._outcome = self._outcome or (None if any("$(" in w.text or "`" in w.text for w in words) else True)
            for word in words:
                self._assign(word, state)
            return
        separators = next((word for word in words[:num_assigned] if word.text.startswith("IFS=")), None)
        words = words[num_assigned:]
        if words[0].text in _READING:
            self._reads(words, state, source=self._read_from, separators=separators)
        self._builtin(words, state)
        if words[0].text in self._functions:
            if self._printed is None:
                self.commands.append(self._expanded(words))
            self._call(words, state)
        elif not self._inner_script(words, state):
            self._started(words, state)

    def _started(self, words: Sequence[Token], state: State) -> None:
        """Note a command that the script starts, or what it prints inside of a `$(...)`."""
        if self._printed is None:
            self.commands.append(self._expanded(words))
        elif (printed := self._prints(words)) is None or (state == "open" and printed):
            self._is_known = False
        else:
            self._printed += printed

    def _expanded(self, words: Sequence[Token]) -> list[LineWord]:
        """Return a command's words: those behind the name of a program exactly as the shell passes them."""
        found: list[LineWord] = []
        is_behind = False
        for word in words:
            found += split_pieces(self._environment.expand(word), is_exact=is_behind)
            is_behind = is_behind or any(_PROGRAM.search(text) for text, _ in found)
        return found

    # ---- substituted commands ----------------------------------------------------------------------------------------

    def _substituted(self, text: str, line: int) -> list[Piece] | None:
        """Return what the commands of a `$(...)` print; None where that is not known without running them."""
        self._num_substituted += 1
        if (document := _DOCUMENT.match(text)) is not None:
            return self._environment.document(document[3], line + 1, is_literal=bool(document[1]))
        if self._num_substituted > _MOST_SUBSTITUTED or self._num_calls > _MOST_CALLS:
            return None
        outer = self._printed, self._is_known, self._rest, self._outcome, self._targets
        variables, conditional = dict(self._environment.variables), dict(self.conditional)
        self._printed, self._is_known, self._rest = [], True, "live"
        self._read(tokens_of(text, self.file, line=line), "live")
        printed = self._printed if self._is_known else None
        self._environment.variables, self.conditional = variables, conditional  # it is a subshell
        self._printed, self._is_known, self._rest, self._outcome, self._targets = outer
        return printed

    def _prints(self, words: Sequence[Token]) -> list[Piece] | None:
        """Return what a command prints, as words; None where it is not known."""
        head, given = words[0].text, list(words[1:])
        if head in _SILENT:
            return []
        if self._targets not in ([], [">&1"]):
            return [] if self._targets == [">&2"] else None
        if head == "echo":
            while given and given[0].text in ("-n", "-e", "-E"):
                del given[0]
        elif head == "printf" and given and _FORMAT.fullmatch(self._text(given[0])):
            del given[0]
        else:
            return None
        line = words[0].line
        return [piece for word in given for piece in (*self._environment.expand(word), blank(word.line))] + [
            blank(line)
        ]

    def _builtin(self, words: Sequence[Token], state: State) -> None:
        """Follow what a command does to the script itself."""
        head, line = words[0].text, words[0].line
        if head in ("echo", "printf", "set", "unset", "shift"):
            self._outcome = True
        if head == "return":
            self._result = _success(words)
        if head in ("exit", "return") and state == "live":
            self._rest = "dead"
        elif head == "return":
            self._rest = "open"
        if head in ("source", ".") and len(words) > 1:
            self.sourced.setdefault(words[1].text, line)
        if head == "shift":
            self._shift(words, state)
        if head == "printf" and len(words) > 1 and words[1].text == "-v":
            self._open_all(words, state)
        if head == "unset":
            for word in words[1:]:
                self._unset(word, state)

    # ---- functions and scripts in the script -------------------------------------------------------------------------

    def _function(self) -> bool:
        texts = [token.text for token in self._tokens[self._at : self._at + 3]]
        if texts[1:] != ["(", ")"] and texts[:1] != ["function"]:
            return False
        name = texts[1] if texts[0] == "function" else texts[0]
        while self._at < len(self._tokens) and self._tokens[self._at].text != "{":
            self._at += 1
        self._at += 1
        begun = self._at
        self._block(("}",), "dead")
        self._outcome = True
        self._functions[name] = self._tokens[begun : self._at - 1]
        return True

    def _leaves(self, word: str) -> bool:
        return word in self._functions or word in _ENDING or _STARTING.search(word) is not None

    def _call(self, words: Sequence[Token], state: State) -> None:
        """Read a function's commands with the arguments of a call; what is its own ends with it."""
        self._num_calls += 1
        if self._num_calls > _MOST_CALLS:  # it calls itself
            self._num_calls -= 1
            return
        before = self._environment.variables
        own, self._own, rest = self._own, {}, self._rest
        shifted, self._environment.num_shifted = self._environment.num_shifted, 0
        self._result = True
        parameters = {name: value for name, value in before.items() if PARAMETER.fullmatch(name)}
        self._set_parameters([self._environment.expand(word) for word in words[1:]])
        self._read(self._functions[words[0].text], state)
        for name, value in self._own.items():
            before[name] = value or []
            if value is None:
                del before[name]
        for name in [name for name in before if PARAMETER.fullmatch(name)]:
            del before[name]
        before.update(parameters)
        self._environment.num_shifted = shifted
        self._outcome = self._result if self._rest == "dead" else None if self._rest == "open" else self._outcome
        self._own, self._rest = own, rest
        self._num_calls -= 1

    def _inner_script(self, words: Sequence[Token], state: State) -> bool:
        """Read what `eval` and `bash -c` are given; return whether the command is one of these."""
        texts = [word.text for word in words]
        shell = next((number for number, text in enumerate(texts[:-2]) if _SHELL.search(text)), None)
        if texts[0] == "eval":
            text = " ".join(self._text(word) for word in words[1:])
        elif shell is not None and texts[shell + 1] in ("-c", "-lc"):
            text = self._text(words[shell + 2])
        else:
            return False
        self._read(tokens_of(text, self.file, line=words[0].line), state)
        return True


def _success(words: Sequence[Token]) -> bool | None:
    """Return whether the outcome that `return` gives is success; None where it is not known."""
    given = words[1].text if len(words) > 1 else ""
    return int(given) == 0 if given.isdecimal() else None
