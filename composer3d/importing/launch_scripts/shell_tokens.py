"""Words and operators of a shell script, with quotes and substitutions left in the words."""

from __future__ import annotations

import re
from dataclasses import dataclass

from composer3d.errors import Problem
from composer3d.importing.launch_scripts.shell_reading import DOCUMENT, LITERAL
from composer3d.importing.leaves import UnreadableSource

__all__ = ["Token", "balanced_end", "tokens_of"]

_OPERATORS = (";;", "&&", "||", "&>", ">>", ">&", "<&", "<<<", ";", "&", "|", "(", ")", "\n", ">", "<")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_ARRAY = re.compile(r"^[A-Za-z_]\w*\+?=$")
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True, kw_only=True)
class Token:
    """A word as it stands in the script, or an operator. Behind that of a document stand its lines, as one word.

    Args:
        text: With its quotes.
        line: Where it begins, from 1.
        is_operator: Whether it is one of `;`, `&&`, a line's end, a redirection and their like.
    """

    text: str
    line: int
    is_operator: bool = False


def tokens_of(text: str, file: str, *, line: int = 1) -> list[Token]:
    """Return the tokens of a script.

    Args:
        text: Of the script, or of what stands in an array's brackets.
        file: Named in problems.
        line: Of its beginning.

    Raises:
        UnreadableSource: A quote, a bracket or a document in the script has no end.
    """
    found: list[Token] = []
    at, end = 0, len(text)
    awaited: list[tuple[str, int]] = []  # ends of documents that begin behind this line, and where their lines go
    while at < end:
        char = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif char in " \t\r":
            at += 1
        elif char == "#":
            at = _line_end(text, at)
        elif char == "<" and (document := _HEREDOC.match(text, at)) and not text.startswith("<<<", at):
            kind = LITERAL if document[1] else DOCUMENT
            found += [Token(text=kind, line=line, is_operator=True), Token(text="", line=line)]
            awaited.append((document[2], len(found) - 1))
            at = document.end()
        elif (operator := next((one for one in _OPERATORS if text.startswith(one, at)), None)) is not None:
            found.append(Token(text=operator, line=line, is_operator=True))
            at += len(operator)
            if operator == "\n":
                line += 1
                for name, place in awaited:
                    begun, first = at, line
                    at, line = _behind_document(text, at, line, name, file)
                    lines = text[begun:at].splitlines(keepends=True)[:-1]
                    found[place] = Token(text="".join(lines), line=first)
                awaited = []
        else:
            stop = _word_end(text, at, file, line)
            word = text[at:stop]
            is_descriptor = word.isdigit() and text[stop : stop + 1] in ("<", ">")
            if not is_descriptor:
                found.append(Token(text=word, line=line))
            line += word.count("\n")
            at = stop
    return found


def balanced_end(text: str, at: int) -> int:
    """Return where a bracket that opens at an index is closed, behind it; -1 where it is not."""
    opening, depth = text[at], 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
            continue
        if char in "'\"":
            at = _quote_end(text, at)
            if at < 0:
                return -1
            continue
        if char == "#" and text[at - 1 : at] in (" ", "\t", "\n"):
            at = _line_end(text, at)
            continue
        depth += (char == opening) - (char == _CLOSING[opening])
        at += 1
        if depth == 0:
            return at
    return -1


def _word_end(text: str, at: int, file: str, line: int) -> int:
    begun = at
    while at < len(text):
        char = text[at]
        stop = at + 1
        if char == "\\":
            stop = at + 2
        elif char in "'\"`":
            stop = _quote_end(text, at)
        elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            stop = balanced_end(text, at + 1)
        elif char == "(" and _ARRAY.match(text[begun:at]):
            stop = balanced_end(text, at)
        elif char in " \t\r\n;&|()<>":
            return at
        if stop < 0:
            place = line + text[begun:at].count("\n")
            raise UnreadableSource(Problem(message=f"{char} is not closed", file=file, line=place))
        at = stop
    return min(at, len(text))


def _quote_end(text: str, at: int) -> int:
    """Return the index behind a quotation that begins at an index; -1 where it has no end."""
    quote = text[at]
    at += 1
    while at < len(text):
        char = text[at]
        if char == quote:
            return at + 1
        if char == "\\" and quote != "'":
            at += 2
        elif char == "$" and quote == '"' and text[at + 1 : at + 2] in ("(", "{"):
            at = balanced_end(text, at + 1)
            if at < 0:
                return -1
        else:
            at += 1
    return -1


def _line_end(text: str, at: int) -> int:
    stop = text.find("\n", at)
    return len(text) if stop < 0 else stop


def _behind_document(text: str, at: int, line: int, name: str, file: str) -> tuple[int, int]:
    begun = line
    while at < len(text):
        stop = _line_end(text, at)
        content = text[at:stop].strip("\t ")
        at, line = min(stop + 1, len(text)), line + 1
        if content == name:
            return at, line
    raise UnreadableSource(Problem(message=f"the document that {name} ends has no end", file=file, line=begun))
