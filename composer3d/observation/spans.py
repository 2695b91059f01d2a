"""Spans: one is opened on every recorder of a run.

Nothing here costs anything where no plugin records spans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.interfaces import Recorder

__all__ = ["opened"]

# nullcontext holds nothing and may be entered any number of times at once.
_NO_SPAN = contextlib.nullcontext()


class _Spans:
    """A span on every recorder; a class, because a generator costs twice as much where microseconds count."""

    __slots__ = ("_attributes", "_name", "_recorders", "_tokens")

    def __init__(self, recorders: tuple[Recorder, ...], name: str, attributes: Mapping[str, Any]) -> None:
        self._recorders, self._name, self._attributes = recorders, name, attributes

    def __enter__(self) -> None:
        name, attributes = self._name, self._attributes
        self._tokens = [recorder.begin(name, attributes) for recorder in self._recorders]

    def __exit__(self, *error: object) -> None:
        for recorder, token in zip(reversed(self._recorders), reversed(self._tokens), strict=True):
            recorder.end(token)


def opened(recorders: tuple[Recorder, ...], name: str, attributes: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a span that is on every recorder while it is entered."""
    return _Spans(recorders, name, attributes) if recorders else _NO_SPAN
