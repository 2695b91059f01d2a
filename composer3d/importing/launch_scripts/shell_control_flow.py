"""Control flow of a shell script that is read and never run: which commands are certain, open, or never reached."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from composer3d.importing.launch_scripts.shell_conditions import arithmetic_holds, joined
from composer3d.importing.launch_scripts.shell_expansion import Environment
from composer3d.importing.launch_scripts.shell_pieces import Piece, split_pieces
from composer3d.importing.launch_scripts.shell_reading import DOCUMENT, LITERAL
from composer3d.importing.launch_scripts.shell_tokens import Token, tokens_of

__all__ = ["REDIRECTIONS", "ControlFlow", "State"]

State: TypeAlias = Literal["live", "open", "dead"]

_CLOSING = ("fi", "done", "esac", "then", "else", "elif", "do", "}")
REDIRECTIONS = ("&>", ">>", ">&", "<&", "<<<", ">", "<", DOCUMENT, LITERAL)
_UNKNOWN = re.compile(r"[$`*?\[{]")  # a value of the outside, files of the machine, or what braces stand for
_MOST_READ = 20_000  # words, of all rounds of a loop
_CHANGED = re.compile(r"([A-Za-z_]\w*)(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")


@dataclass(kw_only=True)
class ControlFlow(ABC):
    """Lists, conditions, loops and brackets; commands and functions are the subclass's.

    Args:
        text: Of the script.
        file: Named in problems.
        values: Of variables, as the user gives them: the script's own assignments of these do not count.

    Attributes:
        conditional: By variable, the line of the condition that its value depends on.
    """

    text: str
    file: str = "script"
    values: Mapping[str, str] = field(default_factory=dict)
    conditional: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._environment = Environment(given=self.values, printed=self._substituted)
        self._tokens = tokens_of(self.text, self.file)
        self._tests: dict[int, str] = {}
        self._at, self._condition = 0, 0
        self._outcome: bool | None = True  # of the last command; None where it is not known
        self._rest: State = "live"  # of what follows: dead behind an exit that is certain
        self._guards: dict[tuple[str, int], int] = {}
        self._begin()
        self._read(self._tokens, "live")

    @abstractmethod
    def _begin(self) -> None:
        """Set what is known before the first command."""

    @abstractmethod
    def _command(self, state: State) -> None:
        """Read a simple command, and set the outcome."""

    @abstractmethod
    def _substituted(self, text: str, line: int) -> list[Piece] | None:
        """Return what commands print; None where that is not known."""

    @abstractmethod
    def _function(self) -> bool:
        """Pass the definition of a function; return whether there was one."""

    def _read(self, tokens: Sequence[Token], state: State) -> None:
        """Read other tokens, and go on where this was."""
        outer, at = self._tokens, self._at
        self._tokens, self._at = list(tokens), 0
        while self._at < len(self._tokens):
            self._block((), state)
            self._at += 1  # a word that closes what was not opened
        self._tokens, self._at = outer, at

    def _block(self, stops: Sequence[str], state: State) -> str:
        """Read commands up to one of the words that end the block; return it. Sets the outcome of the last command."""
        self._outcome = True
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.text in stops:
                self._at += 1
                return token.text
            if token.is_operator and token.text != "(":
                self._at += 1
            elif token.text in _CLOSING:
                return token.text
            else:
                self._list(state)
        return ""

    def _list(self, state: State) -> None:
        """Read pipelines joined by `&&` and `||`: the outcome of what stands before decides whether the next runs."""
        begun, outer = self._at, self._condition
        self._pipeline(state)
        while (joint := self._operator("&&", "||")) != "":
            outcome = self._outcome
            runs = None if outcome is None else outcome == (joint == "&&")
            self._pipeline(self._nested(state, runs, self._tokens[begun], self._tokens[begun : self._at]))
            if runs is not True:
                self._outcome = joined(joint, (outcome, self._outcome)) if runs is None else outcome
        self._condition = outer

    def _pipeline(self, state: State) -> None:
        is_negated = False
        while self._at < len(self._tokens) and self._tokens[self._at].text in ("!", "time"):
            is_negated ^= self._tokens[self._at].text == "!"
            self._at += 1
        self._element(state)
        while self._operator("|"):
            self._element(state)
        if is_negated and self._outcome is not None:
            self._outcome = not self._outcome

    def _operator(self, *texts: str) -> str:
        """Pass an operator that joins commands, and the ends of lines behind it; return it, "" if it is none."""
        if self._at >= len(self._tokens) or not self._tokens[self._at].is_operator:
            return ""
        text = self._tokens[self._at].text
        if text not in texts:
            return ""
        self._at += 1
        while self._at < len(self._tokens) and self._tokens[self._at].text == "\n":
            self._at += 1
        return text

    def _element(self, state: State) -> None:
        """Read a command, simple or compound."""
        if self._at >= len(self._tokens):
            return
        token = self._tokens[self._at]
        state = _less_certain(state, self._rest)
        if token.is_operator and token.text == "(":
            self._brackets(state)
        elif token.text == "if":
            self._branches(state)
        elif token.text in ("for", "while", "until", "select"):
            self._loop(state, token)
        elif token.text == "case":
            self._cases(state, token)
        elif token.text == "{":
            self._at += 1
            self._block(("}",), state)
        elif not self._function():
            self._command(state)
            return
        while self._at < len(self._tokens) and self._tokens[self._at].text in REDIRECTIONS:
            self._at += 2

    def _brackets(self, state: State) -> None:
        """Read `(( ))`, or a subshell: what it sets ends with it."""
        if [token.text for token in self._tokens[self._at : self._at + 2]] != ["(", "("]:
            variables, conditional = dict(self._environment.variables), dict(self.conditional)
            rest = self._rest
            self._at += 1
            self._block((")",), state)
            self._environment.variables, self.conditional, self._rest = variables, conditional, rest
            return
        line, text, depth = self._tokens[self._at].line, "", 0
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            depth += token.is_operator and token.text == "("
            depth -= token.is_operator and token.text == ")"
            text += token.text
            if depth == 0:
                break
        changed = _CHANGED.findall(text)
        self._outcome = None if changed or state == "dead" else arithmetic_holds(text[2:-2], self._environment)
        for names in changed:
            self._open("".join(names), line, state)

    def _branches(self, state: State) -> None:
        is_decided = False
        chosen: State = state
        while True:
            first = self._tokens[self._at]
            self._at += 1
            begun = self._at
            self._block(("then",), "dead" if is_decided else state)
            condition = self._tokens[begun : self._at - 1]
            if state == "dead" or is_decided:
                chosen = "dead"
            else:
                known = self._outcome
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
            self._outcome = None
            return

    def _loop(self, state: State, at: Token) -> None:
        """Read a loop: but for known words, how often it runs is not known, nor what its variable holds."""
        if at.text == "for" and state == "live" and self._over_words():
            return
        nested = self._nested(state, None, at)
        self._at += 1
        if at.text in ("for", "select"):
            head = self._until("do")
            if head and head[0].text.isidentifier():
                self._open(head[0].text, at.line, nested)
        else:
            self._block(("do",), nested)
        self._block(("done",), nested)
        self._outcome = None

    def _over_words(self) -> bool:
        """Read a `for` once for each of its words; return whether all is known of it, else nothing is read.

        Not where it starts a program, of which one call alone is read, or may end before its words do.
        """
        begun, rest = self._at, self._rest
        self._at += 1
        head = [token for token in self._until("do") if not token.is_operator]
        body_at = self._at
        self._block(("done",), "dead")
        body, behind = self._tokens[body_at : self._at - 1], self._at
        self._at, self._rest = begun, rest
        words = self._words_in(head)
        texts = [token.text for token in body if not token.is_operator]
        if words is None or len(words) * len(body) > _MOST_READ or any(map(self._leaves, texts)):
            return False
        for text, line in words:
            self.conditional.pop(head[0].text, None)
            self._environment.variables[head[0].text] = [Piece(text=text, line=line)]
            self._read(body, "live")
        self._at, self._outcome = behind, None
        return True

    def _words_in(self, head: Sequence[Token]) -> list[tuple[str, int]] | None:
        """Return the words that a loop's variable takes, each with its line; None where one is not known."""
        if len(head) < 2 or head[1].text != "in" or not head[0].text.isidentifier() or head[0].text in self.values:
            return None
        words: list[tuple[str, int]] = []
        for token in head[2:]:
            words += split_pieces(self._environment.expand(token), is_exact=True)
        return None if any(_UNKNOWN.search(word) for word, _ in words) else words

    @abstractmethod
    def _leaves(self, word: str) -> bool:
        """Return whether a word in a loop may end it, or starts what is read once."""

    def _nested(self, state: State, known: bool | None, at: Token, condition: Sequence[Token] = ()) -> State:
        if state == "dead" or known is False:
            return "dead"
        if known is None:
            self._condition = at.line
            self._tests[at.line] = " ".join(token.text for token in condition)
            return "open"
        return state

    def _cases(self, state: State, at: Token) -> None:
        self._at += 1
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
                    self._outcome = None
                    return
                if token.is_operator and token.text == ")":
                    break
                if not token.is_operator:
                    patterns.append(token)
            known = None if value is None else any(_matches(value, token.text) for token in patterns)
            branch: State = "dead" if is_decided else self._nested(state, known, at, subject)
            is_decided = is_decided or known is True
            if self._block((";;", "esac"), branch) == "esac":
                self._outcome = None
                return

    def _until(self, stop: str) -> list[Token]:
        """Return the tokens up to a reserved word, which is passed."""
        begun = self._at
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if token.text == stop and not token.is_operator:
                return self._tokens[begun : self._at - 1]
        return self._tokens[begun:]

    def _open(self, name: str, line: int, state: State, *, is_added: bool = False) -> None:
        """Leave a variable open: it is set to what only the run knows."""
        if name in self.values or state == "dead":
            return
        self.conditional[name] = self._guards[name, line] = self._condition if state == "open" else line
        self._environment.open(name, line, is_added=is_added)


def _less_certain(one: State, other: State) -> State:
    return max(one, other, key=("live", "open", "dead").index)


def _matches(value: str, pattern: str) -> bool:
    return fnmatchcase(value, pattern.strip("\"'"))
