"""The example of a forward that a caller gives to `compose`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from composer3d.errors import BatchError

__all__ = ["checked_example"]

Given = TypeVar("Given")


def checked_example(example: Given) -> Given:
    """Return an example, or what makes one.

    Raises:
        BatchError: It is no pair of arguments and keyword arguments.
    """
    given: Any = example
    if given is None or callable(given):
        return example
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if is_pair and isinstance(given[0], tuple | list) and isinstance(given[1], Mapping):
        return example
    inside = f" of {', '.join(type(each).__name__ for each in given)}" if isinstance(given, tuple | list) else ""
    raise BatchError(
        "example is a pair of the forward's arguments, a tuple, and its keyword arguments, a dict; "
        f"{type(given).__name__}{inside} was given; write example=((tokens,), {{}}), or ((), {{...}})"
    )
