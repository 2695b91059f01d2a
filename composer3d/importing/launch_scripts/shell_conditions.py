"""Conditions of a shell script, decided where their values are known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from composer3d.importing.launch_scripts.shell_expansion import Environment
from composer3d.importing.launch_scripts.shell_tokens import Token

__all__ = ["arithmetic_holds", "holds", "joined"]

_NUMBERS = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}
_COMPARED = {"==": "-eq", "!=": "-ne", "<": "-lt", "<=": "-le", ">": "-gt", ">=": "-ge"}
_COMPARISON = re.compile(r"^([^<>=!&|]+)(==|!=|<=|>=|<|>)([^<>=!&|]+)$")


def holds(command: Sequence[Token], environment: Environment) -> bool | None:
    """Return whether a command succeeds; None where that is not known, as of every command that is not a test.

    Args:
        command: Its words; of `[[`, with the operators between them.
        environment: Of the script, at that place.
    """
    head = command[0].text
    if head in ("true", ":", "false"):
        return head != "false"
    if head == "test":
        return _test(command[1:], environment)
    if head == "[":
        return _test(command[1:-1], environment)
    if head != "[[" or any(token.is_operator and token.text in "()" for token in command):
        return None
    alternatives = [_split(part, "&&") for part in _split(command[1:-1], "||")]
    return joined("||", (joined("&&", (_test(one, environment, True) for one in part)) for part in alternatives))


def arithmetic_holds(text: str, environment: Environment) -> bool | None:
    """Return whether `(( text ))` succeeds; None where that is not known.

    Args:
        text: Between the brackets.
        environment: Of the script, at that place.
    """
    found = _COMPARISON.match(text)
    if found is None:
        value = environment.whole_number(text)
        return None if value is None else value != 0
    left, right = environment.whole_number(found[1]), environment.whole_number(found[3])
    return None if left is None or right is None else bool(_NUMBERS[_COMPARED[found[2]]](left, right))


def joined(operator: str, outcomes: Iterable[bool | None]) -> bool | None:
    """Return the outcome of a list of commands, each run whatever the others do.

    Args:
        operator: `&&` or `||`.
        outcomes: Of the commands; None where not known.
    """
    decides = operator == "||"
    found = list(outcomes)
    if decides in found:
        return decides
    return None if None in found else not decides


def _split(tokens: Sequence[Token], operator: str) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    for token in tokens:
        if token.is_operator and token.text == operator:
            parts.append([])
        elif token.text != "\n":
            parts[-1].append(token)
    return parts


def _test(tokens: Sequence[Token], environment: Environment, is_extended: bool = False) -> bool | None:
    """Return the answer of one test; `[[` is the extended one, which neither splits words nor drops empty ones."""
    if tokens and tokens[0].text == "!":
        answer = _test(tokens[1:], environment, is_extended)
        return None if answer is None else not answer
    values = [_known(token, environment) for token in tokens]
    for token, value in zip(tokens, values, strict=True):
        if value == "" and not is_extended and not _is_quoted(token):
            return None  # the word is dropped, and the test another one
    return _answer(tokens, values, is_extended)


def _answer(tokens: Sequence[Token], values: list[str | None], is_extended: bool) -> bool | None:
    texts = [token.text for token in tokens]
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return None if values[1] is None else (values[1] == "") == (texts[0] == "-z")
    if len(texts) == 1:
        return None if values[0] is None else values[0] != ""
    if len(texts) != 3 or values[0] is None or values[2] is None:
        return None
    left, operator, right = values[0], texts[1], values[2]
    if operator in ("=", "==", "!="):
        is_pattern = is_extended and not _is_quoted(tokens[2])
        is_same = fnmatchcase(left, right) if is_pattern else left == right
        return is_same == (operator != "!=")
    if operator in _NUMBERS:
        if not (_is_whole(left) and _is_whole(right)):
            return None
        return bool(_NUMBERS[operator](int(left), int(right)))
    return None


def _is_quoted(token: Token) -> bool:
    return '"' in token.text or "'" in token.text


def _is_whole(text: str) -> bool:
    return text.lstrip("-").isdigit() and len(text) < 20


def _known(token: Token, environment: Environment) -> str | None:
    """Return a word's text; None where it is not known, as of a variable that is set outside of the script."""
    before = dict(environment.uncertain)
    text = "".join(piece.text for piece in environment.expand(token)).strip()
    is_certain = environment.uncertain == before
    environment.uncertain = before
    return text if is_certain and "$" not in text and "`" not in text else None
