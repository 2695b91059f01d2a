"""Launch scripts in shell, read without running them: what their variables hold, and the commands they would start.

Assignments, arrays, arithmetic, defaults (`${X:-1}`) and conditions on known values are followed. Loops, functions,
substituted commands and conditions on files are not: what depends on them is open, and keeps its text (`$NAME`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from composer3d.importing.shell_conditions import holds
from composer3d.importing.shell_expansion import Environment, Piece, split_pieces
from composer3d.importing.shell_tokens import Token, tokens_of

__all__ = ["LineWord", "ShellScript"]

LineWord: TypeAlias = tuple[str, int]
State: TypeAlias = Literal["live", "open", "dead"]

_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_ENDS = (";", "\n", "&&", "||", "|", "&", ";;", "(", ")")


@dataclass(kw_only=True)
class ShellScript:
    """A script's commands and variables, as far as they are known.

    Args:
        text: Of the script.
        file: Named in problems.
        values: Of variables, as the user gives them: the script's own assignments of these do not count.
    """

    text: str
    file: str = "script"
    values: Mapping[str, str] = field(default_factory=dict)
    commands: list[list[LineWord]] = field(init=False, default_factory=list)
    conditional: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._environment = Environment(given=self.values)
        self._tokens = tokens_of(self.text, self.file)
        self._tests: dict[int, str] = {}
        self._at, self._condition = 0, 0
        while self._at < len(self._tokens):
            self._block((), "live")
            self._at += 1  # a word that closes what was not opened

    @property
    def variables(self) -> Mapping[str, list[LineWord]]:
        """The words of every variable."""
        return {name: split_pieces(pieces) for name, pieces in self._environment.variables.items()}

    def hint_of(self, condition: int) -> str:
        """Return how the condition of a line becomes known."""
        names = list(dict.fromkeys(re.findall(r"\$\{?(\w+)", self._tests.get(condition, ""))))
        names = [self._environment.argument_behind(name) for name in names]
        return " ".join(f"--arg {name}=VALUE" for name in names) or "import the command's flags after --"

    # ---- control flow ------------------------------------------------------------------------------------------------

    def _block(self, stops: Sequence[str], state: State) -> str:
        """Read commands up to one of the words that end the block; return it."""
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.is_operator:
                self._at += 1
                if token.text in stops:
                    return token.text
                continue
            if token.text in stops:
                self._at += 1
                return token.text
            if token.text == "if":
                self._branches(state)
            elif token.text in ("for", "while", "until", "select"):
                self._until("do")
                self._block(("done",), self._nested(state, None, token))
            elif token.text == "case":
                self._cases(state, token)
            elif token.text == "{":
                self._at += 1
                self._block(("}",), state)
            elif self._is_function():
                self._block(("}",), "dead")
            elif token.text in ("fi", "done", "esac", "then", "else", "elif", "do", "}"):
                return token.text
            else:
                self._command(state)
        return ""

    def _branches(self, state: State) -> None:
        is_decided = False
        chosen: State = state
        while True:
            first = self._tokens[self._at]
            condition = self._until("then")
            known = None if state == "dead" else holds(condition, self._environment)
            if state == "dead" or is_decided:
                chosen = "dead"
            else:
                chosen = self._nested(state, known, first, condition)
                is_decided = known is True
                if known is None:
                    state = "open"
            ended = self._block(("elif", "else", "fi"), chosen)
            if ended == "elif":
                self._at -= 1
                continue
            if ended == "else":
                self._block(("fi",), "dead" if is_decided else state)
            return

    def _nested(self, state: State, known: bool | None, at: Token, condition: Sequence[Token] = ()) -> State:
        if state == "dead" or known is False:
            return "dead"
        if known is None:
            self._condition = at.line
            self._tests[at.line] = " ".join(token.text for token in condition)
            return "open"
        return state

    def _cases(self, state: State, at: Token) -> None:
        subject = self._until("in")
        words = split_pieces([piece for token in subject for piece in self._environment.expand(token)])
        value = words[0][0] if len(words) == 1 and "$" not in words[0][0] else None
        is_decided = False
        while self._at < len(self._tokens):
            patterns: list[Token] = []
            while self._at < len(self._tokens):
                token = self._tokens[self._at]
                self._at += 1
                if token.text == "esac" and not token.is_operator and not patterns:
                    return
                if token.is_operator and token.text == ")":
                    break
                if not token.is_operator:
                    patterns.append(token)
            known = None if value is None else any(_matches(value, token.text) for token in patterns)
            branch: State = "dead" if is_decided else self._nested(state, known, at, subject)
            is_decided = is_decided or known is True
            if self._block((";;", "esac"), branch) == "esac":
                return

    def _until(self, stop: str) -> list[Token]:
        """Return the tokens between this one and a reserved word, which is passed."""
        self._at += 1
        begun = self._at
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if token.text == stop and not token.is_operator:
                return self._tokens[begun : self._at - 1]
        return self._tokens[begun:]

    def _is_function(self) -> bool:
        """Pass the head of a function's definition, if there is one."""
        texts = [token.text for token in self._tokens[self._at : self._at + 3]]
        if texts[1:] != ["(", ")"] and texts[:1] != ["function"]:
            return False
        while self._at < len(self._tokens) and self._tokens[self._at].text != "{":
            self._at += 1
        self._at += 1
        return True

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _command(self, state: State) -> None:
        words: list[Token] = []
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.is_operator and token.text in _ENDS:
                break
            self._at += 1
            if token.is_operator:  # a redirection, whose target follows
                self._at += 1
            else:
                words.append(token)
        if state == "dead" or not words:
            return
        if words[0].text in _DECLARING:
            words = [word for word in words[1:] if not word.text.startswith("-")]
            if not all(_ASSIGNED.match(word.text) for word in words):
                return
        while words and (found := _ASSIGNED.match(words[0].text)) is not None:
            self._assign(words.pop(0), found, state)
        if words:
            pieces: list[Piece] = []
            for word in words:
                pieces += [*self._environment.expand(word), Piece(text=" ", line=word.line, is_split=True)]
            self.commands.append(split_pieces(pieces))

    def _assign(self, word: Token, found: re.Match[str], state: State) -> None:
        name = found[1]
        if name in self.values:
            return
        if state == "open":
            self.conditional[name] = self._condition
            self._environment.open(name, word.line, is_added=bool(found[2]))
            return
        value = Token(text=word.text[found.end() :], line=word.line + word.text[: found.end()].count("\n"))
        self._environment.assign(name, value, is_added=bool(found[2]))
        if not found[2]:
            self.conditional.pop(name, None)


def _matches(value: str, pattern: str) -> bool:
    from fnmatch import fnmatchcase

    return fnmatchcase(value, pattern.strip("\"'"))
