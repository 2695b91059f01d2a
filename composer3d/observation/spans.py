"""Spans: one is opened on every recorder of a run.

Nothing here costs anything where no plugin records spans.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from operator import call
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.interfaces import Recorder

__all__ = ["Opener"]

# nullcontext holds nothing and may be entered any number of times at once.
_NO_SPAN = contextlib.nullcontext()


class Opener:
    """Opens spans; methods of recorders are looked up once, since steps call them dozens of times.

    Args:
        recorders: In the order in which spans begin on them, and end in reverse.
    """

    def __init__(self, recorders: Sequence[Recorder] = ()) -> None:
        self.recorders = tuple(recorders)
        self.begins = tuple(recorder.begin for recorder in self.recorders)
        self.ends = tuple(recorder.end for recorder in reversed(self.recorders))

    def opened(self, name: str, attributes: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a span that is on every recorder while it is entered."""
        return _Spans(self, name, attributes) if self.begins else _NO_SPAN


class _Spans:
    """A span on every recorder; a class without loops, because steps open dozens, and microseconds count."""

    __slots__ = ("_attributes", "_begins", "_ends", "_name", "_tokens")

    def __init__(self, opener: Opener, name: str, attributes: Mapping[str, Any]) -> None:
        self._begins: Sequence[Callable[[str, Mapping[str, Any]], Any]] = opener.begins
        self._ends: Sequence[Callable[[Any], None]] = opener.ends
        self._name, self._attributes = name, attributes

    def __enter__(self) -> None:
        self._tokens = list(map(call, self._begins, repeat(self._name), repeat(self._attributes)))

    def __exit__(self, *error: object) -> None:
        deque(map(call, self._ends, reversed(self._tokens)), maxlen=0)
