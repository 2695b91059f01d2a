"""Spans: one is opened on every recorder of a run.

Nothing here costs anything where no plugin records spans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from composer3d.interfaces import Recorder

__all__ = ["Opener"]

# nullcontext holds nothing and may be entered any number of times at once.
_NO_SPAN = contextlib.nullcontext()


class Opener:
    """Opens spans; methods of recorders are looked up once, since steps call them dozens of times.

    Args:
        recorders: In the order in which spans begin on them, and end in reverse.
        acting: A recorder, before these, of spans that are opened while some plugin acts.
        turns: Empty but then.
    """

    def __init__(
        self,
        recorders: Sequence[Recorder] = (),
        *,
        acting: Recorder | None = None,
        turns: Collection[object] = (),
    ) -> None:
        self.recorders, self.acting, self.turns = tuple(recorders), acting, turns
        self._plain = _methods(self.recorders)
        self._acted = self._plain if acting is None else _methods((acting, *self.recorders))

    def opened(self, name: str, attributes: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a span that is on every recorder while it is entered."""
        if not self.recorders:
            return _NO_SPAN
        span = _Spans()
        span.begins, span.ends = self._acted if self.turns else self._plain
        span.name, span.attributes = name, attributes
        return span

    def beside(self, *, first: Sequence[Recorder] = (), last: Sequence[Recorder] = ()) -> Opener:
        """Return an opener of spans that are on more recorders, before these and after them."""
        return Opener((*first, *self.recorders, *last), acting=self.acting, turns=self.turns)


_Methods: TypeAlias = tuple[Sequence[Callable[[str, Mapping[str, Any]], Any]], Sequence[Callable[[Any], None]]]


def _methods(recorders: Sequence[Recorder]) -> _Methods:
    """Return what begins spans on recorders, and what ends them, in order."""
    return tuple(each.begin for each in recorders), tuple(each.end for each in reversed(recorders))


class _Spans:
    """A span on every recorder; a class, because a generator costs twice as much where microseconds count.

    Without `__init__`, which costs as much as the rest of making one, and with loops of the plainest kind.
    """

    __slots__ = ("attributes", "begins", "ends", "name", "tokens")

    begins: Sequence[Callable[[str, Mapping[str, Any]], Any]]
    ends: Sequence[Callable[[Any], None]]
    name: str
    attributes: Mapping[str, Any]
    tokens: list[Any]

    def __enter__(self) -> None:
        name, attributes = self.name, self.attributes
        self.tokens = tokens = []
        for begin in self.begins:
            tokens.append(begin(name, attributes))

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        pop = self.tokens.pop
        for end in self.ends:
            end(pop())
