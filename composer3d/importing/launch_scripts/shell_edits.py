"""Edits of a variable's text inside of `${...}`: replacements, prefixes and suffixes cut off, letters, parts of it."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["edit_of"]

# Of a text in which a pattern is looked for, which takes its length to the power of one more than the pattern's stars.
_MOST_CHARACTERS, _MOST_TRIES, _MOST_STARS = 20_000, 1e7, 3
_PART = re.compile(r"^:\s*(-?\d+|\s-\d+)\s*(?::\s*(-?\d+))?$")
_PATTERN = re.compile(r"((?:\\.|[^\\/])*)(?:/(.*))?", re.DOTALL)
_ESCAPED = re.compile(r"\\[*?\[]")
_CASES: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}
Edit = Callable[[str], str | None]


def edit_of(operator: str, expand: Callable[[str], str]) -> Edit | None:
    """Return what an operator behind a variable's name does to its text; None for another one.

    The function returns None where a text is too long to be searched.

    Args:
        operator: As `/a/b`, `//a/b`, `#a`, `##a`, `%a`, `%%a`, `^^`, `,,`, `:1:2`.
        expand: Puts values of variables in a pattern or a replacement.
    """
    if operator in _CASES:
        return _CASES[operator]
    if operator.startswith("/"):
        return _replacing(operator[1:], expand)
    if operator[:1] in ("#", "%"):
        return _cutting(operator, expand)
    found = _PART.match(operator)
    return None if found is None else _part(int(found[1]), None if found[2] is None else int(found[2]))


def _replacing(stated: str, expand: Callable[[str], str]) -> Edit | None:
    is_all, stated = stated.startswith("/"), stated.removeprefix("/")
    anchor, stated = (stated[0], stated[1:]) if stated[:1] in ("#", "%") and not is_all else ("", stated)
    found = _PATTERN.match(stated)
    assert found is not None, "anything matches"
    pattern, other = found[1], found[2] or ""
    is_known, pattern = not _ESCAPED.search(pattern), expand(pattern)
    searched = _regular(pattern) if is_known else None
    if searched is None or not pattern:
        return None
    searched = f"\\A{searched}" if anchor == "#" else f"{searched}\\Z" if anchor == "%" else searched
    compiled, text = re.compile(searched, re.DOTALL), expand(other)
    return _short(pattern, lambda value: compiled.sub(lambda _: text, value, count=0 if is_all else 1))


def _cutting(operator: str, expand: Callable[[str], str]) -> Edit | None:
    kind = operator[0]
    is_longest = operator.startswith(kind * 2)
    pattern = expand(operator[2 if is_longest else 1 :])
    searched = _regular(pattern)
    if searched is None:
        return None
    compiled = re.compile(searched, re.DOTALL)

    def cut(value: str) -> str:
        places = range(len(value) + 1)
        if kind == "#":
            ends = [at for at in places if compiled.fullmatch(value, 0, at)]
            return value[(max if is_longest else min)(ends) :] if ends else value
        begins = [at for at in places if compiled.fullmatch(value, at)]
        return value[: (min if is_longest else max)(begins)] if begins else value

    return _short(f"*{pattern}", cut)  # it is looked for at every place


def _part(begin: int, length: int | None) -> Edit:
    def part(value: str) -> str:
        at = max(len(value) + begin, 0) if begin < 0 else begin
        stop = len(value) if length is None else len(value) + length if length < 0 else at + length
        return value[at:stop]

    return part


def _short(pattern: str, edit: Callable[[str], str]) -> Edit:
    """Refuse texts in which a pattern would be looked for without end."""
    most = min(_MOST_CHARACTERS, _MOST_TRIES ** (1 / (1 + pattern.count("*"))))
    return lambda value: edit(value) if len(value) <= most else None


def _regular(pattern: str) -> str | None:
    """Return a pattern of the shell as a regular expression; None for one that takes long, or is not known."""
    if pattern.count("*") > _MOST_STARS or "$" in pattern or "`" in pattern:
        return None
    found = "".join(map(_sign, re.findall(r"\\.|\[[^\]\\]+\]|.", pattern, re.DOTALL)))
    try:
        re.compile(found)
    except re.error:  # characters from z to a
        return None
    return found


def _sign(part: str) -> str:
    if len(part) > 2:  # one of several characters
        others = part[1] in "!^"
        characters = part[1 + others : -1].replace("[", "\\[").replace("^", "\\^")
        return f"[{'^' * others}{characters}]"
    return {"*": ".*", "?": "."}.get(part) or re.escape(part[-1])
