"""Conditions of a shell script, decided where their values are known."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from composer3d.importing.shell_expansion import Environment
from composer3d.importing.shell_tokens import Token

__all__ = ["holds"]

_NUMBERS = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}


def holds(condition: Sequence[Token], environment: Environment) -> bool | None:
    """Return whether a condition is true; None where that is not known.

    Args:
        condition: Tokens between `if` and `then`.
        environment: Of the script, at that place.
    """
    result: bool | None = None
    pending, part = "", []
    for token in [*condition, Token(text=";", line=0, is_operator=True)]:
        if not (token.is_operator and token.text in (";", "&&", "||", "\n")) and token.text not in ("&&", "||"):
            part.append(token)
            continue
        if part:
            found = _test(part, environment)
            result = found if not pending else _joined(pending, result, found)
            part = []
        pending = token.text if token.text in ("&&", "||") else pending
    return result


def _joined(operator: str, left: bool | None, right: bool | None) -> bool | None:
    decides = operator == "||"
    if left is decides or right is decides:
        return decides
    return None if left is None or right is None else not decides


def _test(tokens: list[Token], environment: Environment) -> bool | None:
    """Return the answer of one test."""
    texts = [token.text for token in tokens if token.text not in ("[", "]", "[[", "]]", "(", ")")]
    bare = [Token(text=text, line=1) for text in texts]
    if len(tokens) == len(texts) and (not texts or texts[0] not in ("true", "false", "test")):
        return None  # a command whose outcome nobody knows
    if texts[:1] in (["true"], ["false"]):
        return texts[0] == "true"
    if texts[:1] == ["test"]:
        texts, bare = texts[1:], bare[1:]
    is_negated = texts[:1] == ["!"]
    if is_negated:
        texts, bare = texts[1:], bare[1:]
    values = [_known(token, environment) for token in bare]
    answer = _answer(texts, values)
    return answer if answer is None or not is_negated else not answer


def _answer(texts: list[str], values: list[str | None]) -> bool | None:
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return None if values[1] is None else (values[1] == "") == (texts[0] == "-z")
    if len(texts) == 1:
        return None if values[0] is None else values[0] != ""
    if len(texts) != 3 or values[0] is None or values[2] is None:
        return None
    left, operator, right = values[0], texts[1], values[2]
    if operator in ("=", "==", "!="):
        return fnmatchcase(left, right) == (operator != "!=")
    if operator in _NUMBERS:
        if not (_is_whole(left) and _is_whole(right)):
            return None
        return bool(_NUMBERS[operator](int(left), int(right)))
    return None


def _is_whole(text: str) -> bool:
    return text.lstrip("-").isdigit() and len(text) < 20


def _known(token: Token, environment: Environment) -> str | None:
    """Return a word's text; None where it is not known. A variable of the outside that nobody gives is empty."""
    text = "".join(piece.text for piece in environment.expand(token)).strip()
    if "$" not in text and "`" not in text:
        return text
    name = text.strip("${}")
    is_outside = name.isidentifier() and name not in environment.variables
    return "" if is_outside else None
