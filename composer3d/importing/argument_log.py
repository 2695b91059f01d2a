"""The block of arguments that Megatron-LM prints into every log: all of them, resolved."""

from __future__ import annotations

import ast
import re
from typing import Any

from composer3d.importing.leaves import SourceTree, TreeBuilder

__all__ = ["has_block_of_arguments", "read_argument_log"]

_BEGINS = re.compile(r"-{4,} arguments -{4,}")
_ENDS = re.compile(r"-{4,} end of arguments -{4,}")
# "  name ........ value", behind whatever a launcher puts before a rank's lines; a long name has fewer dots.
_LINE = re.compile(r"^(?:.*?[\s:])??\s*([A-Za-z_]\w*) \.{2,}(?: (.*))?$")


def has_block_of_arguments(text: str) -> bool:
    """Return whether a text holds such a block."""
    return _BEGINS.search(text) is not None


def read_argument_log(text: str, file: str) -> SourceTree:
    """Read the first block into leaves, one an argument.

    Args:
        text: A log, or the block of one.
        file: Named in problems.

    Raises:
        UnreadableSource: The block has no end, or no line of an argument.
    """
    builder, is_inside, begun = TreeBuilder(file=file), False, 1
    for number, line in enumerate(text.splitlines(), 1):
        if not is_inside:
            is_inside = _BEGINS.search(line) is not None
            begun = number
            continue
        if _ENDS.search(line):
            break
        found = _LINE.match(line.rstrip())
        if found is not None:
            builder.add((found[1],), _value(found[2] or ""), number, found.start(1) + 1)
    else:
        raise builder.fail("the block of arguments has no end", begun)
    if not builder.leaves:
        raise builder.fail("the block of arguments is empty", begun)
    return builder.tree(text)


def _value(text: str) -> Any:
    """Return a value as Python prints it, or the text itself."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return list(value) if isinstance(value, tuple) else value if _is_plain(value) else text


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
