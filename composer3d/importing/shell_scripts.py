"""Launch scripts in shell, read without running them: what their variables hold, and the commands they would start.

Assignments, arrays, arithmetic, defaults (`${X:-1}`) and conditions on known values (`if`, `case`, `&&`, `||`) are
followed. Loops, functions, substituted commands and conditions on files or on variables set outside are not: what
depends on them is open, and keeps its text (`$NAME`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

from composer3d.importing.shell_conditions import arithmetic_holds, holds, joined
from composer3d.importing.shell_expansion import Environment, Piece, split_pieces
from composer3d.importing.shell_tokens import Token, tokens_of

__all__ = ["LineWord", "ShellScript"]

LineWord: TypeAlias = tuple[str, int]
State: TypeAlias = Literal["live", "open", "dead"]

_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_TESTS = ("[", "[[", "test", "true", "false", ":")
_READING = ("read", "mapfile", "readarray", "getopts", "let")
_CLOSING = ("fi", "done", "esac", "then", "else", "elif", "do", "}")
_REDIRECTIONS = ("&>", ">>", ">&", "<&", "<<<", ">", "<")
_CHANGED = re.compile(r"([A-Za-z_]\w*)(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")
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
        self._outcome: bool | None = True  # of the last command; None where it is not known
        self._is_over = False  # an exit that is certain has been passed
        self._functions: dict[str, dict[str, bool]] = {}  # what each sets, and whether that is added
        self._guards: dict[tuple[str, int], int] = {}
        while self._at < len(self._tokens):
            self._block((), "live")
            self._at += 1  # a word that closes what was not opened

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

    # ---- control flow ------------------------------------------------------------------------------------------------

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
        if self._at == len(self._tokens) or not self._tokens[self._at].is_operator:
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
        if self._at == len(self._tokens):
            return
        token = self._tokens[self._at]
        state = "dead" if self._is_over else state
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
        while self._at < len(self._tokens) and self._tokens[self._at].text in _REDIRECTIONS:
            self._at += 2

    def _brackets(self, state: State) -> None:
        """Read `(( ))`, or a subshell: what it sets ends with it."""
        if [token.text for token in self._tokens[self._at : self._at + 2]] != ["(", "("]:
            variables, conditional = dict(self._environment.variables), dict(self.conditional)
            is_over = self._is_over
            self._at += 1
            self._block((")",), state)
            self._environment.variables, self.conditional, self._is_over = variables, conditional, is_over
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
        """Read a loop: how often it runs is not known, nor what its variable holds."""
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

    def _function(self) -> bool:
        """Pass a function's definition, if there is one: what it sets is open from its first call on."""
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
        own = {"local", "declare", "typeset"}
        body = [Token(text="", line=0), *self._tokens[begun : self._at]]
        found = [_ASSIGNED.match(word.text) for before, word in pairwise(body) if before.text not in own]
        self._functions[name] = {one[1]: _is_added(one) for one in found if one is not None}
        return True

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _words(self) -> list[Token]:
        """Return the words of a simple command, or all that `[[` encloses."""
        words: list[Token] = []
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
            words = [word for word in words if _ASSIGNED.match(word.text)]
        num_assigned = next((n for n, word in enumerate(words) if not _ASSIGNED.match(word.text)), len(words))
        if num_assigned == len(words):  # before a command they are that command's alone
            self._outcome = self._outcome or (None if any("$(" in w.text or "`" in w.text for w in words) else True)
            for word in words:
                self._assign(word, state)
            return
        words = words[num_assigned:]
        self._builtin(words, state)
        pieces: list[Piece] = []
        for word in words:
            pieces += [*self._environment.expand(word), Piece(text=" ", line=word.line, is_split=True)]
        self.commands.append(split_pieces(pieces))

    def _builtin(self, words: Sequence[Token], state: State) -> None:
        """Follow what a command does to the script itself."""
        head, line = words[0].text, words[0].line
        if head in ("echo", "printf", "set", "unset"):
            self._outcome = True
        if head == "exit" and state == "live":
            self._is_over = True
        if head in self._functions:
            self._condition = line
            for name, is_added in self._functions[head].items():
                self._open(name, line, state, is_added=is_added)
        if head in _READING or (head == "printf" and len(words) > 1 and words[1].text == "-v"):
            for word in words[1:]:
                if found := re.match(r"[A-Za-z_]\w*", word.text):
                    self._open(found[0], line, state)
        if head == "unset":
            for word in words[1:]:
                if state == "live" and word.text not in self.values:
                    self._environment.variables[word.text] = []
                else:
                    self._open(word.text, line, state)

    def _open(self, name: str, line: int, state: State, *, is_added: bool = False) -> None:
        """Leave a variable open: it is set to what only the run knows."""
        if name in self.values or state == "dead":
            return
        self.conditional[name] = self._guards[name, line] = self._condition if state == "open" else line
        self._environment.open(name, line, is_added=is_added)

    def _assign(self, word: Token, state: State) -> None:
        found = _ASSIGNED.match(word.text)
        assert found is not None
        name = found[1]
        if name in self.values:
            return
        text = word.text[found.end() :]
        if state == "open":
            self._open(name, word.line, state, is_added=_is_added(found))
            return
        value = Token(text=text, line=word.line + word.text[: found.end()].count("\n"))
        self._environment.assign(name, value, is_added=bool(found[2]))
        if not found[2] and f"${name}" not in text and f"${{{name}" not in text:
            self.conditional.pop(name, None)


def _is_added(assigned: re.Match[str]) -> bool:
    """Return whether an assignment keeps what the variable holds, in front: `A+=...` and `A="$A ..."`."""
    text = assigned.string[assigned.end() :]
    return bool(assigned[2]) or re.match(rf"\(?\s*\"?\$\{{?{assigned[1]}\b", text) is not None


def _matches(value: str, pattern: str) -> bool:
    from fnmatch import fnmatchcase

    return fnmatchcase(value, pattern.strip("\"'"))
