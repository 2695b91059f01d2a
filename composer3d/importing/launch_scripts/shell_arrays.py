"""Arrays of a shell script: single elements, parts, lengths, and edits of every element."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from composer3d.importing.launch_scripts.shell_edits import edit_of
from composer3d.importing.launch_scripts.shell_pieces import Piece, blank, split_pieces

__all__ = ["Arrays"]

_ITEM = re.compile(r"^(\w+)\[([^@*\]]+)\]$")
_LENGTH = re.compile(r"^#(\w+)(\[[@*]\])?$")
_PART = re.compile(r"^(?:(\w+)\[[@*]\]|[@*]):\s*([^:]+?)\s*(?::\s*([^:]+?)\s*)?$")
_EACH = re.compile(r"^(\w+)\[[@*]\]([/#%^,].*)$", re.DOTALL)
_KEYED = re.compile(r"^\[[^\]]*\]=")

Element: TypeAlias = tuple[int, str, int]  # index, text, line


@dataclass(kw_only=True)
class Arrays:
    """Elements of a script's arrays.

    Args:
        variables: Of the script.
        number: Returns the value of an arithmetic expression; None where it is not known.
        text: Returns a text with the values of variables in it.

    Attributes:
        indices: Of arrays that have holes.
    """

    variables: dict[str, list[Piece]]
    number: Callable[[str], int | None]
    text: Callable[[str], str]
    indices: dict[str, list[int]] = field(default_factory=dict)

    def looked_up(self, inner: str, line: int) -> list[Piece] | None:
        """Return what stands between the braces of `${...}`, where it is of an array or a length, and is known.

        Args:
            inner: As `A[1]`, `#A[@]`, `#NAME`, `A[@]:1:2`, `A[@]/a/b`, `@:2`.
            line: Of the reference.
        """
        if (item := _ITEM.match(inner)) is not None:
            elements, at = self._known(item[1]), self.number(item[2])
            if elements is None or at is None:
                return None
            at = elements[-1][0] + 1 + at if at < 0 and elements else at
            return [Piece(text=text, line=place) for index, text, place in elements if index == at]
        if (length := _LENGTH.match(inner)) is not None:
            elements = self._known(length[1])
            if elements is None:
                return None
            whole = "".join(piece.text for piece in self.variables[length[1]])
            return [Piece(text=str(len(elements) if length[2] else len(whole)), line=line)]
        if (part := _PART.match(inner)) is not None:
            return self._part(part[1], part[2], part[3])
        each = _EACH.match(inner)
        elements = self._known(each[1]) if each is not None else None
        edit = edit_of(each[2], self.text) if each is not None and elements is not None else None
        if elements is None or edit is None:
            return None
        edited = [edit(text) for _, text, _ in elements]
        return (
            None
            if None in edited
            else _joined([(text or "", line) for text, (_, _, line) in zip(edited, elements, strict=True)])
        )

    def set_item(self, name: str, index: str, value: list[Piece]) -> bool:
        """Set an element; return whether the array and the index are known."""
        at, elements = self.number(index), self._known(name) if name in self.variables else []
        if at is None or elements is None:
            return False
        at = elements[-1][0] + 1 + at if at < 0 and elements else at
        text, line = "".join(piece.text for piece in value), value[0].line if value else 1
        self._set(name, sorted([each for each in elements if each[0] != at] + [(at, text, line)]))
        return at >= 0

    def unset_item(self, name: str, index: str) -> bool:
        """Remove an element, whose index stays free; return whether the array and the index are known."""
        at, elements = self.number(index), self._known(name)
        if at is None or elements is None:
            return False
        at = elements[-1][0] + 1 + at if at < 0 and elements else at
        self._set(name, [each for each in elements if each[0] != at])
        return True

    def _part(self, name: str | None, first: str, length: str | None) -> list[Piece] | None:
        begin, count = self.number(first), None if length is None else self.number(length)
        elements = self._known("@" if name is None else name)
        if elements is None or begin is None or (length is not None and count is None) or (count or 0) < 0:
            return None
        if name is None:  # arguments are counted from 1, and 0 is the script's name
            elements = [(index + 1, text, line) for index, text, line in elements]
            if begin == 0:
                return None
        if begin < 0:
            begin = elements[-1][0] + 1 + begin if elements else 0
        found = [(text, line) for index, text, line in elements if index >= begin]
        return _joined(found if count is None else found[:count])

    def _known(self, name: str) -> list[Element] | None:
        """Return an array's elements; None where it is not set, has keys, or is not known."""
        if name not in self.variables:
            return None
        words = split_pieces(self.variables[name], is_exact=True)
        if any(_KEYED.match(word) or "$" in word or "`" in word for word, _ in words):
            return None
        indices = self.indices.get(name)
        if indices is None or len(indices) > len(words):
            indices = []
        begin = indices[-1] + 1 if indices else 0
        indices = [*indices, *range(begin, begin + len(words) - len(indices))]
        return [(index, word, line) for index, (word, line) in zip(indices, words, strict=True)]

    def _set(self, name: str, elements: list[Element]) -> None:
        self.variables[name] = _joined([(text, line) for _, text, line in elements])
        self.indices[name] = [index for index, _, _ in elements]
        if self.indices[name] == list(range(len(elements))):
            del self.indices[name]


def _joined(words: list[tuple[str, int]]) -> list[Piece]:
    return [piece for text, line in words for piece in (Piece(text=text, line=line), blank(line))]
