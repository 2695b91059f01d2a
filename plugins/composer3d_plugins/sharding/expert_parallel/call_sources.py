"""Contract of experts, or weights of experts, that a block's own code calls with rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Caller", "Source"]


class Caller(Protocol):
    """Exchange around a block, to which calls of its code go.

    Attributes:
        fqn: Of the block.
    """

    fqn: str

    def called(self, source: Source, number: int, rows: Tensor) -> Tensor:
        """Return the results of rows, or what stands for them."""


class Source(Protocol):
    """Experts, or matrices of them, that a block's code calls; those of a rank are consecutive.

    Attributes:
        fqn: Of what holds them, for messages.
        total: How many are called, of all ranks.
        is_varied: Whether what is called may return the same of other results: a module that is given rows of memory to
            which results were written. Products are always made of those that they are multiplied with.
    """

    fqn: str
    total: int
    is_varied: bool

    def running(self, exchange: Caller) -> AbstractContextManager[Any]:
        """Let the block's code find what records and replays, while it runs."""

    def width(self, number: int, given: int) -> int:
        """Return the elements of a row of results, by those of a row."""

    def width_given(self) -> int:
        """Return the elements of a row where nobody gives any; 0 where this makes no difference."""

    def compute(self, rows: Sequence[Tensor], is_called: Sequence[bool]) -> list[Tensor]:
        """Return the results of rows for each that this rank holds, as many, of the width stated.

        Where there are none its parameters are in the graph all the same, if data-parallel plugins reduce them by
        themselves.
        """

    def note(self, local: list[int], chosen: list[int]) -> None:
        """Take the numbers of rows for each that this rank holds, and of this rank's rows for each of all ranks."""
