"""Contract of experts, or weights of experts, that a block's own code calls with rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Caller", "Source", "number_of", "row_of", "shown"]


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
        is_rowwise: Whether it does the same with every row of a tensor; else samples of three dims and more, along the
            first, are exchanged whole.
    """

    fqn: str
    total: int
    is_varied: bool
    is_rowwise: bool

    def running(self, exchange: Caller) -> AbstractContextManager[Any]:
        """Let the block's code find what records and replays, while it runs."""

    def result(self, number: int, given: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the result of a row, or of a sample, by its own."""

    def given(self) -> tuple[int, ...]:
        """Return the sizes of a row where nobody gives any; none where this makes no difference."""

    def compute(self, rows: Sequence[Tensor], is_called: Sequence[bool]) -> list[Tensor]:
        """Return the results of rows for each that this rank holds, as many, of the sizes stated.

        Where there are none its parameters are in the graph all the same, if data-parallel plugins reduce them by
        themselves.
        """

    def note(self, local: list[int], chosen: list[int]) -> None:
        """Take the numbers of rows for each that this rank holds, and of this rank's rows for each of all ranks."""


def row_of(source: Source, x: Tensor) -> tuple[int, ...]:
    """Return the sizes of what is exchanged as one, a row or a sample, of what a source is called with."""
    return tuple(x.shape[-1:] if source.is_rowwise or x.ndim < 3 else x.shape[1:])


def number_of(x: Tensor, row: tuple[int, ...]) -> int:
    """Return how many rows, or samples, of these sizes there are."""
    return math.prod(x.shape[: x.ndim - len(row)])


def shown(sizes: tuple[int, ...]) -> str:
    """Return sizes for a message."""
    return " x ".join(map(str, sizes))
