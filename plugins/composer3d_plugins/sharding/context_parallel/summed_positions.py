"""Sums by position: what is added to a position first is written there, and memory is not filled with zeros before.

Letters as in `block_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from composer3d_plugins.sharding.context_parallel.block_kernels import positions_of
from composer3d_plugins.sharding.context_parallel.sequence_positions import Run

__all__ = ["Sum", "SummedPositions", "SummedTensor", "WrittenRuns", "is_side_by_side", "side_by_side"]


class Sum(Protocol):
    """Sum to which gradients of positions are added."""

    def add(self, run: Run, values: torch.Tensor) -> None:
        """Add the values of a run."""


class WrittenRuns:
    """Positions that have been written, as runs."""

    def __init__(self) -> None:
        self._written: list[Run] = []

    def write(self, run: Run) -> list[tuple[Run, bool]]:
        """Return the parts of a run in order, and whether each was written before; all of it is written now."""
        start, end = run
        parts: list[tuple[Run, bool]] = []
        others: list[Run] = []
        low, high, at = start, end, start
        for first, last in self._written:
            if last < start or first > end:
                others.append((first, last))
                continue
            low, high = min(low, first), max(high, last)
            if (a := max(first, start)) < (b := min(last, end)):
                if at < a:
                    parts.append(((at, a), False))
                parts.append(((a, b), True))
                at = b
        if at < end:
            parts.append(((at, end), False))
        self._written = sorted([*others, (low, high)])
        return parts

    def left(self, run: Run) -> list[Run]:
        """Return the parts of a run that were not written; now they are."""
        return [part for part, is_written in self.write(run) if not is_written]


def side_by_side(like: torch.Tensor, *, dtype: torch.dtype | None = None, width: int | None = None) -> torch.Tensor:
    """Return memory for [B, H, n, E] in which the heads of a position are neighbours, as torch's kernels return it.

    Code that has heads side by side before and after attention then needs no copy of it, nor of its gradient.

    Args:
        like: Has the other sizes.
        dtype: Default that of `like`.
        width: E, default that of `like`.
    """
    batch, heads, length, _ = like.shape
    return like.new_empty((batch, length, heads, width or like.shape[-1]), dtype=dtype or like.dtype).transpose(1, 2)


def is_side_by_side(x: torch.Tensor, *, dtype: torch.dtype) -> bool:
    """Return whether a tensor is what `side_by_side` would have returned memory for."""
    return x.dtype is dtype and x.transpose(1, 2).is_contiguous()


class SummedPositions:
    """A sum of tensors [B, H, n, E] that are of runs of positions.

    Memory: that of its pieces.

    Args:
        pieces: In order of positions, each with the position at which it begins: memory, whose content is not read.
    """

    def __init__(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._pieces, self._written = pieces, WrittenRuns()

    def add(self, run: Run, values: torch.Tensor) -> None:
        """Add the values of a run."""
        for begin, piece in self._pieces:
            start, end = max(run[0], begin), min(run[1], begin + piece.shape[2])
            for (low, high), is_written in self._written.write((start, end)) if start < end else ():
                view = positions_of(piece, (low - begin, high - begin))
                given = positions_of(values, (low - run[0], high - run[0]))
                if is_written:
                    view.add_(given)
                else:
                    view.copy_(given)

    def end(self) -> None:
        """Write zeros where nothing was added."""
        for begin, piece in self._pieces:
            for low, high in self._written.left((begin, begin + piece.shape[2])) if piece.shape[2] else ():
                piece.narrow(2, low - begin, high - low).zero_()


class SummedTensor:
    """The same of one tensor. Values of all positions that come first are taken as they are, and added to in place.

    Args:
        like: [B, H, n, E], of the sum's sizes.
        dtype: Of the sum.
    """

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._total: torch.Tensor | None = None
        self._sum: SummedPositions | None = None

    def add(self, run: Run, values: torch.Tensor) -> None:
        """Add the values of a run, which nothing else reads."""
        is_whole = self._total is None and run == (0, self._like.shape[2])
        if is_whole and is_side_by_side(values, dtype=self._dtype):
            self._total = values
        elif self._total is not None and self._sum is None:
            positions_of(self._total, run).add_(values)
        else:
            self._summed().add(run, values)

    def _summed(self) -> SummedPositions:
        if self._sum is None:
            self._total = side_by_side(self._like, dtype=self._dtype)
            self._sum = SummedPositions([(0, self._total)])
        return self._sum

    def total(self) -> torch.Tensor:
        """Return the sum; 0 where nothing was added."""
        if self._total is None:
            self._summed()
        if self._sum is not None:
            self._sum.end()
        assert self._total is not None, "made"
        return self._total
