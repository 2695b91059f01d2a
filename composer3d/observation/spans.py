"""Spans: one is opened on every recorder of a run.

Nothing here costs anything where no plugin records spans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
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
    """A span on every recorder; a class, because a generator costs twice as much where microseconds count."""

    __slots__ = ("_attributes", "_name", "_opener", "_tokens")

    def __init__(self, opener: Opener, name: str, attributes: Mapping[str, Any]) -> None:
        self._opener, self._name, self._attributes = opener, name, attributes

    def __enter__(self) -> None:
        name, attributes = self._name, self._attributes
        self._tokens = [begin(name, attributes) for begin in self._opener.begins]

    def __exit__(self, *error: object) -> None:
        for end, token in zip(self._opener.ends, reversed(self._tokens), strict=True):
            end(token)
