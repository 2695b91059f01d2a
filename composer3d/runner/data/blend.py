"""Blends of sources: samples of each in the share of its weight, as a function of seed and position."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer3d.composition import indices
from composer3d.errors import DataError
from composer3d.runner.data.data_source import Sample, Source

__all__ = ["BlendSource", "JoinedSource", "counts_of", "open_blend"]

# Shares are multiples of 1 / _PERIOD; of every period each source gives its count.
_PERIOD = 1 << 18


class JoinedSource(Source):
    """Several sources after each other.

    Args:
        sources: At least one.
        weights: As the manifest states them, for the record.
        evaluation: The samples held out.
    """

    def __init__(
        self, sources: Sequence[Source], *, weights: Sequence[float], evaluation: Source | None = None
    ) -> None:
        sizes = [source.vocab_size for source in sources]
        known = [size for size in sizes if size is not None]
        super().__init__(vocab_size=max(known) if len(known) == len(sizes) else None, evaluation=evaluation)
        self._sources, self._weights = tuple(sources), tuple(weights)
        self._ends = list(accumulate(len(source) for source in sources))

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """Return the number of tokens of each sample, where every source says so."""
        found = [source.lengths for source in self._sources]
        known = [lengths for lengths in found if lengths is not None]
        return np.concatenate(known) if len(known) == len(found) else None

    @property
    def modified(self) -> dict[str, int]:
        """Return when each file was last changed, of all sources."""
        return {name: when for source in self._sources for name, when in source.modified.items()}

    @property
    def draws(self) -> bool:
        """Return whether a source draws."""
        return any(source.draws for source in self._sources)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        place = bisect_right(self._ends, index)
        return self._sources[place][index - (self._ends[place - 1] if place else 0)]

    def record(self) -> dict[str, Any]:
        """Return the records of all sources, with their weights."""
        sources = [
            {"weight": weight, **source.record()} for weight, source in zip(self._weights, self._sources, strict=True)
        ]
        return {
            "kind": "blend",
            "sources": sources,
            "num_samples": len(self),
            "num_evaluation_samples": len(self.evaluation) if self.evaluation is not None else 0,
            "vocab_size": self.vocab_size,
            "tokenizer": sources[0].get("tokenizer"),
        }


class BlendSource(JoinedSource):
    """Several sources, whose samples are drawn by weight.

    Position p of the endless stream belongs to one source: of every 262,144 positions each has as many as its weight
    says, evenly spaced, as near to its share of any stretch as whole samples allow. Its own samples come in an order of
    its own, all of them before one comes again. Both are functions of the seed and of p.

    Args:
        sources: At least one.
        weights: Their shares of the samples; the sum need not be 1.
        evaluation: The samples held out.

    Memory: 6 bytes a position of a period.
    """

    def __init__(
        self, sources: Sequence[Source], *, weights: Sequence[float], evaluation: Source | None = None
    ) -> None:
        super().__init__(sources, weights=weights, evaluation=evaluation)
        self._counts = counts_of(weights)
        # The j-th sample of a source that has n of the period stands at (j + 1/2) / n of it.
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts.tolist()])
        order = np.argsort(times, kind="stable")
        self._owner = np.repeat(np.arange(len(sources), dtype=np.uint16), self._counts)[order]
        self._rank = np.concatenate([np.arange(count, dtype=np.int32) for count in self._counts.tolist()])[order]

    def samples_at(self, positions: NDArray[np.int64], *, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Return the samples at positions of the stream."""
        periods, places = np.divmod(positions, len(self._owner))
        owners = self._owner[places]
        found = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(owners).tolist():
            mine = owners == number
            drawn = periods[mine] * int(self._counts[number]) + self._rank[places[mine]]
            first, size = int(drawn.min()), len(self._sources[number])
            count = int(drawn.max()) - first + 1
            own = indices(first, count, size=size, seed=_seed_of(seed, number), shuffle=shuffle)
            found[mine] = own[drawn - first] + self._ends[number] - size
        return found

    def order_facts(self) -> dict[str, Any]:
        """Return what the order of samples depends on: the positions of each source in a period, and its size."""
        return {"blend": [[int(count), len(each)] for count, each in zip(self._counts, self._sources, strict=True)]}


def counts_of(weights: Sequence[float]) -> NDArray[np.int64]:
    """Return how many positions of a period each weight has: rounded by largest remainders.

    Raises:
        DataError: A weight is too small to have one.
    """
    ideal = np.asarray(weights, dtype=np.float64) / sum(weights) * _PERIOD
    counts = np.floor(ideal).astype(np.int64)
    for place in np.argsort(counts - ideal, kind="stable")[: _PERIOD - int(counts.sum())]:
        counts[place] += 1
    if counts.min() < 1:
        least = weights[int(counts.argmin())]
        raise DataError(f"[data] blend: weight = {least} is less than one sample of {_PERIOD}; raise it, or remove it")
    return counts


def open_blend(sources: Sequence[Source], weights: Sequence[float]) -> BlendSource:
    """Return the blend of sources; what each holds out is evaluated one after the other."""
    held = [(source.evaluation, weight) for source, weight in zip(sources, weights, strict=True) if source.evaluation]
    evaluation = None
    if held:
        evaluation = JoinedSource([source for source, _ in held], weights=[weight for _, weight in held])
    return BlendSource(sources, weights=weights, evaluation=evaluation)


def _seed_of(seed: int, number: int) -> int:
    """Return a seed of its own for each source."""
    return int.from_bytes(blake2b(f"blend {seed} {number}".encode(), digest_size=8).digest(), "little") >> 1
