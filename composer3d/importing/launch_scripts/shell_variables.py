"""Variables of a shell script as commands change them: assignments, elements of arrays, arguments, `read`, `unset`."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from composer3d.importing.launch_scripts.shell_control_flow import ControlFlow, State
from composer3d.importing.launch_scripts.shell_pieces import Piece, blank
from composer3d.importing.launch_scripts.shell_reading import LITERAL, Reading
from composer3d.importing.launch_scripts.shell_tokens import Token

__all__ = ["PARAMETER", "ScriptVariables", "is_assignment"]

PARAMETER = re.compile(r"\d+|[@*#]")
_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_ITEM_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)\[([^\]]*)\](\+?)=", re.DOTALL)
_ITEM = re.compile(r"^['\"]?([A-Za-z_]\w*)\[([^\]]*)\]['\"]?$")
_MOST_PARAMETERS = 100


def is_assignment(text: str) -> bool:
    """Return whether a word sets a variable, or an element of an array."""
    return _ASSIGNED.match(text) is not None or _ITEM_ASSIGNED.match(text) is not None


@dataclass(kw_only=True)
class ScriptVariables(ControlFlow, ABC):
    """A script's variables, as commands change them."""

    def __post_init__(self) -> None:
        self._own: dict[str, list[Piece] | None] = {}
        self._num_calls = 0
        super().__post_init__()

    def _text(self, word: Token) -> str:
        return "".join(piece.text for piece in self._environment.expand(word))

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Set the script's arguments that the user gives, behind those that were shifted away."""
        shifted, variables = self._environment.num_shifted, self._environment.variables
        given = {n: self.values.get(str(n + shifted)) for n in range(1, _MOST_PARAMETERS)}
        number = next(n for n in given if given[n] is None)
        self._set_parameters([[Piece(text=given[n] or "", line=1)] for n in range(1, number)])
        if number == 1:  # all of them, and how many there are, are known to the outside alone
            for name in "@*#":
                del variables[name]
        for n, value in given.items():
            variables.pop(str(n), None)
            if value is not None:
                variables[str(n)] = [Piece(text=value, line=1, is_split=True)]

    def _set_parameters(self, values: Sequence[list[Piece]]) -> None:
        """Set `$1` and the others, and `$@`."""
        variables = self._environment.variables
        for name in [name for name in variables if PARAMETER.fullmatch(name)]:
            del variables[name]
        variables.update({str(number): value for number, value in enumerate(values, start=1)})
        variables["@"] = variables["*"] = [piece for value in values for piece in (*value, blank(1))]
        variables["#"] = [Piece(text=str(len(values)), line=1)]

    def _shift(self, words: Sequence[Token], state: State) -> None:
        """Follow `shift`; where it may not run, or by how many is not known, no argument is."""
        variables, given = self._environment.variables, "1" if len(words) == 1 else self._text(words[1])
        numbers = sorted(int(name) for name in variables if name.isdecimal())
        if state == "dead":
            return
        if state == "open" or not given.isdecimal():
            for number in numbers:
                variables[str(number)] = [Piece(text="$(shift)", line=words[0].line, is_split=True)]
        elif self._num_calls:
            self._set_parameters([variables[str(number)] for number in numbers if number > int(given)])
        else:
            self._environment.num_shifted += int(given)
            self._begin()

    def _keep(self, names: Iterable[str]) -> None:
        """Note what variables hold that are a call's own from here on."""
        for name in names:
            if self._num_calls:
                self._own.setdefault(name, self._environment.variables.get(name))

    # ---- assignments -------------------------------------------------------------------------------------------------

    def _assign(self, word: Token, state: State) -> None:
        item, found = _ITEM_ASSIGNED.match(word.text), _ASSIGNED.match(word.text)
        if item is not None:
            self._assign_item(word, item, state)
            return
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

    def _assign_item(self, word: Token, item: re.Match[str], state: State) -> None:
        if item[1] in self.values:
            return
        value = self._environment.expand(Token(text=word.text[item.end() :], line=word.line))
        is_known = state == "live" and not item[3]
        if not is_known or not self._environment.arrays.set_item(item[1], item[2], value):
            self._open(item[1], word.line, state)

    def _open_all(self, words: Sequence[Token], state: State) -> None:
        for word in words[1:]:
            if found := re.match(r"[A-Za-z_]\w*", word.text):
                self._open(found[0], words[0].line, state)

    def _unset(self, word: Token, state: State) -> None:
        item = _ITEM.match(word.text)
        name = word.text if item is None else item[1]
        if state != "live" or name in self.values:
            self._open(name, word.line, state)
        elif item is None:
            self._environment.variables[name] = []
        elif not self._environment.arrays.unset_item(name, item[2]):
            self._open(name, word.line, state)

    def _reads(
        self, words: Sequence[Token], state: State, *, source: tuple[str, Token] | None, separators: Token | None
    ) -> None:
        """Follow a `read` of a text that stands in the script; of anything else its variables are not known."""
        reading = Reading([self._text(word) for word in words[1:]])
        self._open_all(words, state)
        if words[0].text != "read" or source is None or state != "live":
            return
        kind, token = source
        if kind == "<<<":
            pieces = [*self._environment.expand(token), Piece(text="\n", line=token.line)]
        else:
            lines = token.text if reading.is_raw or kind != LITERAL else token.text.replace("\\\n", "")
            pieces = self._environment.document(lines, token.line, is_literal=kind == LITERAL)
        if reading.is_whole:
            self._environment.variables.update({name: pieces for name in reading.names if name not in self.values})
            return
        between = " \t\n" if separators is None else self._text(replace(separators, text=separators.text[4:]))
        is_known = kind == LITERAL or not any("$" in piece.text or "`" in piece.text for piece in pieces)
        text = "".join(piece.text for piece in pieces)
        found = reading.fields(text, between) if is_known else None
        for name, fields in zip(reading.names, found or [], strict=False):
            if name not in self.values:
                self.conditional.pop(name, None)
                spread = [part for each in fields for part in (Piece(text=each, line=token.line), blank(token.line))]
                self._environment.variables[name] = spread if reading.is_array else spread[:-1]


def _is_added(assigned: re.Match[str]) -> bool:
    """Return whether an assignment keeps what the variable holds, in front: `A+=...` and `A="$A ..."`."""
    text = assigned.string[assigned.end() :]
    return bool(assigned[2]) or re.match(rf"\(?\s*\"?\$\{{?{assigned[1]}\b", text) is not None
