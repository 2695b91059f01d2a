"""Positions of a sequence by rank: runs and index lists, contiguous or balanced, of any length."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "Positions",
    "Run",
    "by_work",
    "contiguous",
    "decoded_runs",
    "encoded_runs",
    "padded_length",
    "zigzag",
]

Run = tuple[int, int]


@dataclass(frozen=True)
class Positions:
    """The positions that each rank holds, in the order in which its shard holds them.

    Any assignment is allowed that gives every position to exactly one rank: shards may be uneven or empty. The order is
    that of the runs, `shard = whole.index_select(dim, positions.index(rank))`.

    Args:
        runs: By rank, half-open runs [start, end) of consecutive positions.
    """

    runs: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        at = 0
        for start, end in sorted(run for rank in self.runs for run in rank):
            if start != at or end <= start:
                raise ValueError(f"positions from {at} on are held by no rank, or by two: a run [{start}, {end})")
            at = end
        # Computed here, since the compiler does not enter the locks of properties that are not computed yet.
        assert self.degree == len(self.encoded) - 2 * sum(map(len, self.runs))
        assert self.length >= self.max_local_length

    @classmethod
    def of(cls, indices: Iterable[Sequence[int]]) -> Positions:
        """Return the positions of index lists, one a rank."""
        return cls(tuple(_runs(index) for index in indices))

    @classmethod
    def joined(cls, parts: Sequence[Positions]) -> Positions:
        """Return those of sequences one after another, of each of which a rank holds its positions."""
        starts = [sum(part.length for part in parts[:at]) for at in range(len(parts))]
        ranks = zip(*(part.runs for part in parts), strict=True)
        return cls(
            tuple(
                tuple((start + a, start + b) for start, runs in zip(starts, rank, strict=True) for a, b in runs)
                for rank in ranks
            )
        )

    @classmethod
    def whole(cls, length: int) -> Positions:
        """Return a sequence that one rank holds."""
        return contiguous(length, 1)

    @functools.cached_property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return sum(self.local_lengths)

    @functools.cached_property
    def degree(self) -> int:
        """Ranks."""
        return len(self.runs)

    @functools.cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """Positions that each rank holds."""
        return tuple(sum(end - start for start, end in rank) for rank in self.runs)

    @functools.cached_property
    def max_local_length(self) -> int:
        """Positions of the rank that holds most."""
        return max(self.local_lengths)

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether all ranks hold equally many."""
        return len(set(self.local_lengths)) == 1

    @functools.cached_property
    def pieces(self) -> list[tuple[int, int, int]]:
        """The runs in order of positions: the rank that holds each, where it begins in its shard, and its length."""
        found = []
        for rank, runs in enumerate(self.runs):
            at = 0
            for start, end in runs:
                found.append((start, rank, at, end - start))
                at += end - start
        return [(rank, at, length) for _, rank, at, length in sorted(found)]

    def index(self, rank: int) -> torch.Tensor:
        """Return a rank's positions, int64 [local length]."""
        return _joined(self.runs[rank])

    def num_below(self, rank: int, bound: int) -> int:
        """Return how many of a rank's positions lie below a bound; in ascending runs they come first."""
        return sum(max(0, min(end, bound) - start) for start, end in self.runs[rank])

    def order(self) -> torch.Tensor:
        """Return all ranks' positions, one rank after another, int64 [length]."""
        return _joined(tuple(run for rank in self.runs for run in rank))

    def inverse(self) -> torch.Tensor:
        """Return where each position lies in `order`, int64 [length]."""
        return torch.argsort(self.order())

    def grouped(self, size: int) -> Positions:
        """Return the positions of groups of neighbouring ranks, each group's in ascending order."""
        starts = range(0, self.degree, size)
        return Positions(tuple(_ascending(self.runs[start : start + size]) for start in starts))

    def within(self, first: int, size: int) -> Positions:
        """Return where the positions of neighbouring ranks lie among those of all of them, in ascending order.

        Args:
            first: The first of the ranks.
            size: How many they are.
        """
        group, starts, at = self.runs[first : first + size], {}, 0
        for start, end in sorted(run for rank in group for run in rank):
            starts[start], at = at, at + end - start
        return Positions(tuple(tuple((starts[a], starts[a] + b - a) for a, b in rank) for rank in group))

    @functools.cached_property
    def encoded(self) -> list[int]:
        """This as integers, the form in which operators take it."""
        return encoded_runs(self.runs)

    @classmethod
    def decoded(cls, numbers: Sequence[int]) -> Positions:
        """Return the positions that `encoded` made integers of."""
        return _decoded(tuple(numbers))


def contiguous(length: int, degree: int) -> Positions:
    """Return equal runs in order; where the degree does not divide the length the first ranks hold one more."""
    bounds = _bounds(length, degree)
    return Positions(tuple(((start, end),) if end > start else () for start, end in bounds))


def zigzag(length: int, degree: int) -> Positions:
    """Return two chunks a rank, the r-th from both ends: under a causal mask all ranks have equal work.

    Where 2 * degree does not divide the length, chunks differ by one position.
    """
    chunks = _bounds(length, 2 * degree)
    pairs = ((chunks[rank], chunks[-1 - rank]) for rank in range(degree))
    return Positions(tuple(_adjacent_joined([run for run in pair if run[1] > run[0]]) for pair in pairs))


def by_work(work: Sequence[float], degree: int, *, least: int = 128) -> Positions:
    """Return positions of which every rank has equally many, and about equal work.

    The sequence is divided into equal blocks, which go by falling work to the rank that has least so far and not its
    number of blocks yet. So packed documents are balanced wherever they end, which a zigzag over all of them is not.

    Args:
        work: Of each position; their number is a multiple of 2 * degree.
        degree: Ranks.
        least: Positions of a block, unless there are fewer than 2 blocks a rank then.
    """
    length = len(work)
    count = next(n for n in (16, 8, 4, 2) if length % (n * degree) == 0 and (n == 2 or length >= n * degree * least))
    size = length // (count * degree)
    totals = [sum(work[start : start + size]) for start in range(0, length, size)]
    held: list[list[int]] = [[] for _ in range(degree)]
    loads = [0.0] * degree
    for block in sorted(range(count * degree), key=lambda block: (-totals[block], block)):
        rank = min((rank for rank in range(degree) if len(held[rank]) < count), key=lambda rank: loads[rank])
        held[rank].append(block)
        loads[rank] += totals[block]
    return Positions(
        tuple(_adjacent_joined([(block * size, block * size + size) for block in sorted(blocks)]) for blocks in held)
    )


def padded_length(length: int, degree: int, *, is_balanced: bool) -> int:
    """Return the next length that all ranks hold equal shards of, balanced ones in equal chunks."""
    unit = 2 * degree if is_balanced else degree
    return -(-length // unit) * unit


def _bounds(length: int, count: int) -> list[Run]:
    size, more = divmod(length, count)
    starts = [index * size + min(index, more) for index in range(count + 1)]
    return list(zip(starts, starts[1:], strict=False))


def _adjacent_joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    joined: list[Run] = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


def _ascending(ranks: Sequence[tuple[Run, ...]]) -> tuple[Run, ...]:
    return _adjacent_joined(sorted(run for rank in ranks for run in rank))


def _runs(index: Sequence[int]) -> tuple[Run, ...]:
    return _adjacent_joined([(position, position + 1) for position in index])


def _joined(runs: tuple[Run, ...]) -> torch.Tensor:
    if not runs:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(start, end) for start, end in runs])


def encoded_runs(ranks: Sequence[tuple[Run, ...]]) -> list[int]:
    """Return runs by rank as integers, the form in which operators take them."""
    return [n for rank in ranks for n in (len(rank), *(bound for run in rank for bound in run))]


def decoded_runs(numbers: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
    """Return the runs by rank that `encoded_runs` made integers of."""
    runs, at = [], 0
    while at < len(numbers):
        end = at + 1 + 2 * numbers[at]
        bounds = numbers[at + 1 : end]
        runs.append(tuple(zip(bounds[::2], bounds[1::2], strict=True)))
        at = end
    return tuple(runs)


@functools.lru_cache(maxsize=256)
def _decoded(numbers: tuple[int, ...]) -> Positions:
    return Positions(decoded_runs(numbers))
