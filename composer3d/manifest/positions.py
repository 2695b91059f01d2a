"""Line and column of every key in a TOML text, found by a scanner: tomli reads values without positions."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TypeAlias

import tomli

__all__ = ["KeyPath", "NestedTooDeeply", "locate", "split_key"]

KeyPath: TypeAlias = tuple[str | int, ...]

# Parsers and everything after them recurse, or keep every prefix of a key.
MAX_DEPTH = 64

_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_BLANK = re.compile(r"(?:[ \t\n]+|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_REST_OF_LINE = re.compile(r"[^\n]*")
# Strings first, the long forms before the short ones. A multi-line string may end with up to two quotes of its own.
# Anything else ends at a delimiter; blanks are inside it because a date and its time may be parted by one.
_SCALAR = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"""|[^,\[\]{}#\n"']+""",
    re.DOTALL,
)


class NestedTooDeeply(Exception):
    """A key path of more than 64 parts, with its 1-based line and column."""

    def __init__(self, line: int, column: int) -> None:
        self.line, self.column = line, column
        super().__init__(f"a key of more than {MAX_DEPTH} parts")


class _NotToml(Exception):
    """The text is not valid TOML here; tomli's message is better, so the scanner only stops."""


def locate(text: str) -> dict[KeyPath, tuple[int, int]]:
    """Return the 1-based line and column of every key and array element of a TOML text.

    The text is scanned token by token as TOML 1.1 defines them, so keys inside strings and comments are not keys. A
    key stands where its own name stands, in a header, before `=`, or inside an inline table; an element of an array
    of tables stands at the name in its header, any other element where its value begins. A table that several places
    mention stands at its own header if it has one, else at the first mention.

    Args:
        text: TOML that tomli accepts. In other text, keys before the first fault are located.

    Raises:
        NestedTooDeeply: A key path has more than 64 parts.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    try:
        scanner.document()
    except _NotToml:
        pass
    return scanner.positions


def split_key(text: str) -> tuple[tuple[str, ...], int] | None:
    """Return the parts of the dotted key that a text starts with and the offset behind it, or None if it has none.

    Raises:
        NestedTooDeeply: It has more than 64 parts.
    """
    try:
        end, parts = _Scanner(text).key(_past(_SPACE, text, 0))
    except _NotToml:
        return None
    return tuple(name for name, _ in parts), end


def _past(pattern: re.Pattern[str], text: str, offset: int) -> int:
    match = pattern.match(text, offset)
    if match is None:
        raise _NotToml
    return match.end()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.positions: dict[KeyPath, tuple[int, int]] = {}
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._num_elements: dict[KeyPath, int] = {}  # of the arrays of tables

    def document(self) -> None:
        table: KeyPath = ()
        offset = _past(_BLANK, self.text, 0)
        while offset < len(self.text):
            if self.text[offset] == "[":
                offset, table = self._header(offset)
            else:
                offset, path = self._key_and_equals(offset, table)
                offset = self._value(offset, path)
            offset = _past(_BLANK, self.text, _past(_REST_OF_LINE, self.text, offset))

    def key(self, offset: int) -> tuple[int, list[tuple[str, int]]]:
        """Read a dotted key; return the offset behind it and its blanks, and each part with its own offset."""
        parts = []
        while True:
            end = _past(_KEY_PART, self.text, offset)
            parts.append((_unquote(self.text[offset:end]), offset))
            end = _past(_SPACE, self.text, end)
            if len(parts) > MAX_DEPTH:
                raise NestedTooDeeply(*self._line_and_column(parts[0][1]))
            if self.text[end : end + 1] != ".":
                return end, parts
            offset = _past(_SPACE, self.text, end + 1)

    def _header(self, offset: int) -> tuple[int, KeyPath]:
        brackets = 2 if self.text.startswith("[[", offset) else 1
        offset, parts = self.key(_past(_SPACE, self.text, offset + brackets))
        path: KeyPath = ()
        for name, place in parts[:-1]:
            path = self._mention((*path, name), place)
            if path in self._num_elements:
                path = (*path, self._num_elements[path] - 1)
        path = (*path, parts[-1][0])
        if brackets == 1:
            self._note(path, parts[-1][1])
            return offset, path
        self._mention(path, parts[-1][1])
        index = self._num_elements.get(path, 0)
        self._num_elements[path] = index + 1
        self._note((*path, index), parts[-1][1])
        return offset, (*path, index)

    def _key_and_equals(self, offset: int, table: KeyPath) -> tuple[int, KeyPath]:
        offset, parts = self.key(offset)
        if self.text[offset : offset + 1] != "=":
            raise _NotToml
        for name, place in parts[:-1]:
            table = self._mention((*table, name), place)
        path = (*table, parts[-1][0])
        self._note(path, parts[-1][1])
        return _past(_SPACE, self.text, offset + 1), path

    def _value(self, offset: int, path: KeyPath) -> int:
        """Pass over a value. One frame a level of nesting: tomli allows 400, Python about 1000."""
        opening = self.text[offset : offset + 1]
        if opening not in ("[", "{"):
            return _past(_SCALAR, self.text, offset)
        closing = "]" if opening == "[" else "}"
        index = 0
        offset = _past(_BLANK, self.text, offset + 1)
        while not self.text.startswith(closing, offset):
            if opening == "[":
                inner: KeyPath = (*path, index)
                self._note(inner, offset)
            else:
                offset, inner = self._key_and_equals(offset, path)
            offset = _past(_BLANK, self.text, self._value(offset, inner))
            index += 1
            if self.text.startswith(",", offset):
                offset = _past(_BLANK, self.text, offset + 1)
            elif not self.text.startswith(closing, offset):
                raise _NotToml
        return offset + 1

    def _note(self, path: KeyPath, offset: int) -> None:
        if len(path) > MAX_DEPTH:
            raise NestedTooDeeply(*self._line_and_column(offset))
        self.positions[path] = self._line_and_column(offset)

    def _line_and_column(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def _mention(self, path: KeyPath, offset: int) -> KeyPath:
        if path not in self.positions:
            self._note(path, offset)
        return path


def _unquote(part: str) -> str:
    if part[0] not in "\"'":
        return part
    try:
        return str(tomli.loads(f"part = {part}")["part"])
    except tomli.TOMLDecodeError:
        raise _NotToml from None
