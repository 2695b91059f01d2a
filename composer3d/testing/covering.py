"""A few rows that hold every pair of options at least once, where all combinations would be too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

__all__ = ["pairwise"]

_Choice = tuple[str, int]
_Pair = tuple[_Choice, _Choice]


def pairwise(
    options: Mapping[str, Sequence[Any]],
    *,
    excluded: Callable[[Mapping[str, Any]], bool] | None = None,
    beginnings: int = 24,
    begin: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return rows, one value of every option each, such that every two values of two options stand together in one.

    Greedy: a row begins with a pair that no row has, and every further option takes the value that makes the most new
    pairs with what the row has; of several such rows the one with the most new pairs is kept. The result depends on the
    arguments alone, and the same options in the same order give the same rows.

    Args:
        options: Name to values; the first values are preferred where nothing else decides.
        excluded: Says that a row cannot be. It is asked with incomplete rows too, and answers True only where no way to
            complete them exists. Pairs that stand in no row that can be are left out.
        beginnings: Of so many uncovered pairs each begins a row, and the row that covers most is taken: more are looked
            at than that only rarely saves a row.
        begin: Rows to begin with, so that what is known of them stays of use when options are added; those that can no
            longer be, or that have no pair of their own, are dropped.

    Returns:
        At least as many rows as the two longest options multiply to, where nothing is excluded.

    Source: Cohen et al., The AETG System: An Approach to Testing Based on Combinatorial Design, IEEE Transactions on
    Software Engineering 23(7), 1997.

    >>> for row in pairwise({"dp": [1, 2], "tp": [1, 2], "pp": [1, 2]}):
    ...     print(*row.values())
    1 1 1
    1 2 2
    2 1 2
    2 2 1
    """
    builder = _Builder(options, excluded or (lambda row: False), beginnings)
    rows: list[dict[str, Any]] = [dict(row) for row in begin if builder.takes(row)]
    while builder.uncovered:
        row = builder.next_row()
        if row is not None:
            rows.append({name: options[name][row[name]] for name in options})
    return rows


class _Builder:
    """Rows under construction, as indices of values; `uncovered` is ordered, so that results repeat."""

    def __init__(
        self, options: Mapping[str, Sequence[Any]], excluded: Callable[[Mapping[str, Any]], bool], beginnings: int
    ) -> None:
        self._beginnings = beginnings
        self._options, self._excluded, self._names = options, excluded, list(options)
        self._places = {name: place for place, name in enumerate(options)}
        pairs = (
            ((one, i), (other, j))
            for one, other in combinations(self._names, 2)
            for i in range(len(options[one]))
            for j in range(len(options[other]))
        )
        self.uncovered: dict[_Pair, None] = dict.fromkeys(pairs)

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Count the pairs of a given row as covered; False for one that cannot be, or has no new pair."""
        if row.keys() != self._options.keys() or self._excluded(row):
            return False
        if any(row[name] not in self._options[name] for name in self._names):
            return False
        pairs = self._new_pairs({name: list(self._options[name]).index(row[name]) for name in self._names})
        for pair in pairs:
            del self.uncovered[pair]
        return bool(pairs)

    def next_row(self) -> dict[str, int] | None:
        """Return the best row of those tried, and count its pairs as covered; None if a pair turned out impossible."""
        best: dict[str, int] | None = None
        best_gain = 0
        for pair in list(self.uncovered)[: self._beginnings]:
            row = next(self._completions(dict(pair)), None)
            if row is None:
                del self.uncovered[pair]
            elif (gain := len(self._new_pairs(row))) > best_gain:
                best, best_gain = row, gain
        for pair in self._new_pairs(best) if best is not None else ():
            del self.uncovered[pair]
        return best

    def _new_pairs(self, row: Mapping[str, int]) -> list[_Pair]:
        chosen = [(name, row[name]) for name in self._names if name in row]
        return [pair for pair in combinations(chosen, 2) if pair in self.uncovered]

    def _completions(self, row: dict[str, int]) -> Iterator[dict[str, int]]:
        """Yield complete rows that begin so, the most promising first."""
        if self._excluded({name: self._options[name][index] for name, index in row.items()}):
            return
        name = next((name for name in self._names if name not in row), None)
        if name is None:
            yield row
            return
        # Sorting is stable: of equal candidates the first value comes first.
        for index in sorted(range(len(self._options[name])), key=lambda index: -self._gain(row, name, index)):
            yield from self._completions({**row, name: index})

    def _gain(self, row: Mapping[str, int], name: str, index: int) -> int:
        """Return how many new pairs one more choice makes with those of a row."""
        mine, place = (name, index), self._places[name]
        return sum(
            (((other, value), mine) if self._places[other] < place else (mine, (other, value))) in self.uncovered
            for other, value in row.items()
        )
