"""JSON as DeepSpeed reads it (Hjson): comments, keys and text without quotes, commas that are missing or left over.

The library of that name gives no places, and every verdict names its line.

Source: hjson.github.io, syntax.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Any

from composer3d.importing.leaves import MAX_DEPTH, SourceTree, TreeBuilder

__all__ = ["read_json"]

_SPACE = re.compile(r"(?:[ \t\r\n\f\v]+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'")
_LONG = re.compile(r"'''(.*?)'''", re.DOTALL)
_BARE_KEY = re.compile(r"[^\s,:\[\]{}'\"]+")
_REST = re.compile(r"[^\n]*")
_END = r"(?=[ \t\r]*(?:[,\]}\n#]|//|/\*|$))"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?" + _END)
_WORD = re.compile(r"(true|false|null|NaN|-?Infinity)" + _END)  # of numbers that are none, as Python's json has them
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
# Words that a script, sed or a template engine puts a value in place of.
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*|\$\{?\w+\}?|\{\{.*\}\}|<[\w -]+>|@\w+@|%\w+%")


def read_json(text: str, file: str) -> SourceTree:
    """Read a JSON or Hjson file into leaves.

    Args:
        text: Of the file.
        file: Named in problems.

    Raises:
        UnreadableSource: It is neither, is nested too deeply, or is a template whose places are not filled in.
    """
    return _Reader(text, file).read()


class _Reader:
    def __init__(self, text: str, file: str, starts: list[int] | None = None) -> None:
        self._text, self._at = text, 0
        self._starts = starts or [0, *(match.end() for match in re.finditer("\n", text))]
        self._builder = TreeBuilder(file=file)

    def read(self) -> SourceTree:
        self._skip()
        if self._next() == "[":
            raise self._fail("is a list, and a configuration is a table", self._at)
        braces = self._next() == "{"
        self._at += braces
        self._table((), closing="}" if braces else "")
        self._skip()
        if self._at < len(self._text):
            raise self._fail(f"{self._text[self._at]!r} stands behind the end of the table", self._at)
        return self._builder.tree(self._text)

    def _table(self, path: tuple[str, ...], *, closing: str) -> bool:
        """Read keys up to the closing brace; return whether there were any."""
        if len(path) >= MAX_DEPTH:
            raise self._fail(f"keys are nested deeper than {MAX_DEPTH} levels", self._at)
        some = False
        while True:
            self._skip()
            here = self._next()
            if here == "," and some:
                self._at += 1
                continue
            if here == closing:
                self._at += bool(closing)
                return some
            if here == "":
                raise self._fail('"}" is missing at the end', self._at)
            start = self._at
            name = self._key()
            self._skip()
            if self._next() != ":":
                raise self._fail(f'":" is missing behind the key "{name[:60]}"', self._at)
            self._at += 1
            self._skip()
            self._entry((*path, name), start)
            some = True

    def _entry(self, path: tuple[str, ...], start: int) -> None:
        if self._next() == "{":
            self._at += 1
            if self._table(path, closing="}"):
                return
            value: Any = {}
        else:
            value = self._value(len(path))
        self._builder.add(path, value, *self._place(start))

    def _value(self, depth: int) -> Any:
        here = self._next()
        if depth > MAX_DEPTH:
            raise self._fail(f"values are nested deeper than {MAX_DEPTH} levels", self._at)
        if here == "[":
            return self._list(depth)
        if here == "{":  # in a list
            inner = _Reader(self._text, self._builder.file, self._starts)
            inner._at = self._at + 1
            inner._table(("",) * depth, closing="}")
            self._at = inner._at
            return {leaf.key.lstrip("."): leaf.value for leaf in inner._builder.leaves.values()}
        if (match := _LONG.match(self._text, self._at)) or (match := _QUOTED.match(self._text, self._at)):
            self._at = match.end()
            return match[1] if match.re is _LONG else _ESCAPE.sub(_unescaped, match[0][1:-1])
        if here in "\"'":
            raise self._fail("a text has no closing quote on its line", self._at)
        if match := _NUMBER.match(self._text, self._at):
            return self._number(match)
        if match := _WORD.match(self._text, self._at):
            self._at = match.end()
            named = {"true": True, "false": False, "null": None}
            return named[match[1]] if match[1] in named else float(match[1])
        return self._bare()

    def _bare(self) -> str:
        """Read a text without quotes, which goes on to the end of its line."""
        match = _REST.match(self._text, self._at)
        assert match is not None, "it matches nothing too"
        word = match[0].strip().rstrip(",").strip()
        if self._next() in ",:]}" or not word:
            raise self._fail("a value is missing", self._at)
        first = re.split(r"[,\]}\s]", word, maxsplit=1)[0]
        if _PLACEHOLDER.fullmatch(word) or _PLACEHOLDER.fullmatch(first):
            hint = "a script puts a value there; import the file that it makes"
            raise self._fail(f"is a template: {first[:60]} stands for a value", self._at, hint=hint)
        self._at = match.end()
        return match[0].strip()

    def _number(self, match: re.Match[str]) -> int | float:
        start, self._at = self._at, match.end()
        try:
            return float(match[0]) if match[1] or match[2] else int(match[0])
        except ValueError:  # Python converts a few thousand digits
            raise self._fail("a number has too many digits", start) from None

    def _list(self, depth: int) -> list[Any]:
        opened, self._at = self._at, self._at + 1
        result: list[Any] = []
        while True:
            self._skip()
            if self._next() == "]":
                self._at += 1
                return result
            if self._next() == "," and result:
                self._at += 1
                continue
            if self._next() == "":
                raise self._fail('"]" is missing at the end of the list', opened)
            result.append(self._value(depth + 1))

    def _key(self) -> str:
        if match := _QUOTED.match(self._text, self._at):
            self._at = match.end()
            return _ESCAPE.sub(_unescaped, match[0][1:-1])
        if match := _BARE_KEY.match(self._text, self._at):
            self._at = match.end()
            return match[0]
        raise self._fail(f"a key is expected, not {self._next()!r}", self._at)

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None, "it matches nothing too"
        self._at = match.end()
        if self._text.startswith("/*", self._at):
            raise self._fail("a comment is not closed", self._at)

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _place(self, at: int) -> tuple[int, int]:
        line = bisect_right(self._starts, at)
        return line, at - self._starts[line - 1] + 1

    def _fail(self, message: str, at: int, *, hint: str | None = None) -> Exception:
        return self._builder.fail(message, *self._place(at), hint=hint)


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else _ESCAPED.get(match[2], match[2])
