"""Parts of one batch's rows that a step's forwards are given, with a backward each: `for part in x.chunk(n)`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.step.losses.rank_weights import RankLoss

__all__ = ["BatchParts", "uneven_numbers"]


class BatchParts:
    """Parts of a batch's rows, by the forwards of a step.

    Attributes:
        num: Forwards of the last backward that were given parts of one tensor's rows, each another one.

    Memory: a few numbers a part; the batch is not kept.
    """

    def __init__(self) -> None:
        self.num = 0
        self._whole: weakref.ref[Tensor] | None = None
        self._forwards: dict[tuple[int, int], int] = {}  # rows of a part of a tensor that begins there
        self._last: dict[tuple[int, int], int] = {}
        self._backwards: dict[int, tuple[int, Sequence[RankLoss]]] = {}  # by where a part begins

    def add_forward(self, first: Tensor) -> None:
        """Record a forward.

        Args:
            first: Tensor that it is given, of rows in its first dim.
        """
        whole = first._base
        if whole is None or whole.dim() != first.dim() or len(first) >= len(whole):
            return
        if first.stride()[1:] == whole.stride()[1:] and not first.stride(0) % max(whole.stride(0), 1):
            self._forwards[id(whole), int(first.storage_offset())] = len(first)
            if self._whole is None or self._whole() is not whole:
                self._whole = weakref.ref(whole)
                self._backwards.clear()

    def end_backward(self) -> None:
        """Record that a backward begins with the forwards since the last one."""
        self._last, self._forwards = self._forwards, {}
        self.num = len(self._last) if len({whole for whole, _ in self._last}) == 1 else 0

    def clear(self) -> None:
        """Begin another step."""
        self._forwards.clear()
        self._backwards.clear()
        self._whole = None

    def complete(self, told: Callable[[], Sequence[RankLoss]]) -> list[Sequence[RankLoss]]:
        """Return the losses of a batch's parts by backward and rank, with the backward that completes the batch.

        Args:
            told: Returns the losses of all ranks in this backward; none where they were not weighed.
        """
        whole = None if self._whole is None else self._whole()
        if self.num != 1 or whole is None or not (ranks := told()):
            return []
        ((_, place), rows) = next(iter(self._last.items()))
        self._backwards[place] = rows, ranks
        num_rows = sum(rows for rows, _ in self._backwards.values())
        # A rank may have cut its own samples from a tensor of all ranks'.
        is_whole = not len(whole) % num_rows and not len(ranks) % (len(whole) // num_rows)
        return [ranks for _, ranks in self._backwards.values()] if is_whole and len(self._backwards) > 1 else []


def uneven_numbers(backwards: Sequence[Sequence[RankLoss]]) -> list[float]:
    """Return the numbers of targets of means, the first of them and another one; none where all are alike.

    Args:
        backwards: Losses of all ranks, of each backward. Of what a loop has multiplied by its number of targets there
            is no mean.
    """
    means = [rank for ranks in backwards for rank in ranks if rank.divisor]
    if not means:
        return []
    first = means[0]
    others = [each for each in means if not math.isclose(each.divisors, first.divisors, rel_tol=1e-9)]
    ratio = first.factor / first.divisor
    if all(math.isclose(each.factor / each.divisor, ratio, rel_tol=1e-9) for each in means):
        return []
    return [first.divisor, others[0].divisor] if others else []
