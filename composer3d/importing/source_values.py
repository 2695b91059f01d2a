"""Values of a source as reports show them: without secrets, cut, and by name where they are not known."""

from __future__ import annotations

import json
import re
from typing import Any

from composer3d.importing.leaves import Leaf
from composer3d.manifest import HIDDEN, hide

__all__ = ["open_name", "shown_value", "written"]

_SECRET_NAMES = re.compile(r"(?:token|secret|password|api_key)$")
# Pieces of text that a tokenizer has.
_TOKENS_OF_TEXT = re.compile(r"(?:^|_)(?:pad|eos|bos|unk|sep|cls|mask|eot|eod|image|start|end|stop)_token$")


def shown_value(leaf: Leaf) -> Any:
    """Return a value without secrets in it."""
    name = leaf.path[-1].lower()
    if _TOKENS_OF_TEXT.search(name):
        return leaf.value
    if isinstance(leaf.value, str) and _SECRET_NAMES.search(name):
        return HIDDEN if leaf.value else ""
    hidden: Any = {leaf.path[-1]: leaf.value}
    for part in reversed(leaf.path[:-1]):
        hidden = {part: hidden}
    hidden = hide(hidden)
    for part in leaf.path:
        hidden = hidden[part]
    return hidden


# What a script's value holds of which nothing is known without running it.
_OPEN = re.compile(r"\$(?:[\w({@*#?!-])|`[^`]*`")
_HEXADECIMAL = re.compile(r"\b0[xX][0-9a-fA-F]+")
_OPEN_NAMES = re.compile(r"\$\{?([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?![\w\[!])|\$\(\([^A-Za-z_)]*([A-Za-z_]\w*)")


def open_name(value: Any) -> str | None:
    """Return the variable of a script that a value is, or is computed from, where it is not known.

    It is empty where several are, or another thing than a variable's value; None of a value that is known.
    """
    texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    if not any(_OPEN.search(text) for text in texts):
        return None
    texts = [_HEXADECIMAL.sub("0", text) for text in texts]
    names = {first or second for text in texts for first, second in _OPEN_NAMES.findall(text)}
    is_more = any(_OPEN.search(_OPEN_NAMES.sub("", text)) for text in texts)
    return names.pop() if len(names) == 1 and not is_more else ""


def written(value: Any) -> str:
    """Return a value as text, of which long ones are cut."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
