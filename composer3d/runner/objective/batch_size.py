"""Global batch size of every step, and the number of sequences before it: pure functions of the step."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING

from composer3d.errors import ManifestError

if TYPE_CHECKING:
    from composer3d.manifest import Manifest
    from composer3d.runner.runner_tables import TrainTable

__all__ = ["BatchSize"]


class BatchSize:
    """The global batch of every step.

    Args:
        table: `[train]`, with `global_batch` or `accumulate`, `microbatch` and `batch_ramp`.
        degree: Data-parallel degree: ranks that share the global batch.

    >>> from composer3d.runner.runner_tables import BatchRampTable, TrainTable
    >>> ramp = BatchRampTable(start=2, step=4, every=3)
    >>> sizes = BatchSize(TrainTable(steps=9, global_batch=8, batch_ramp=ramp), degree=1)
    >>> [sizes.of(step) for step in range(8)], sizes.position_of(8)
    ([2, 2, 2, 6, 6, 6, 8, 8], 40)
    """

    def __init__(self, table: TrainTable, *, degree: int) -> None:
        self._table, self._degree = table, degree
        self._microbatch = table.microbatch or 1
        self.largest = table.batch_over(degree)

    def of(self, step: int) -> int:
        """Return the sequences of a step, counted from 0."""
        ramp = self._table.batch_ramp
        if ramp is None:
            return self.largest
        if ramp.every is None:
            return self._plateau(step)[2]
        return min(ramp.start + step // ramp.every * ramp.step, self.largest)

    def position_of(self, step: int) -> int:
        """Return the sequences of all steps before a step."""
        ramp = self._table.batch_ramp
        if ramp is None:
            return step * self.largest
        if ramp.every is None:
            first, position, size = self._plateau(step)
            return position + (step - first) * size
        # k whole plateaus of the ramp lie before the step, unless the ramp has ended by then.
        length = -(-(self.largest - ramp.start) // ramp.step)
        full, rest = min(divmod(step, ramp.every), (length, step - length * ramp.every))
        plateaus = full * ramp.start + ramp.step * full * (full - 1) // 2
        return plateaus * ramp.every + rest * self.of(full * ramp.every)

    def _plateau(self, step: int) -> tuple[int, int, int]:
        """Return the first step of the size that a step has, the sequences before it, and the size."""
        return self._by_samples[bisect_right(self._by_samples, step, key=lambda plateau: plateau[0]) - 1]

    @functools.cached_property
    def _by_samples(self) -> list[tuple[int, int, int]]:
        """Return the sizes of a ramp by samples: a step has the size that belongs to the sequences before it."""
        ramp = self._table.batch_ramp
        assert ramp is not None and ramp.samples is not None
        whole = ramp.samples
        increments = -(-(self.largest - ramp.start) // ramp.step)
        if not increments:
            return [(0, 0, self.largest)]
        share = whole / increments

        def size_after(position: int) -> int:
            grown = increments if position > whole else int(position / share)
            return min(ramp.start + grown * ramp.step, self.largest)

        first, position, plateaus = 0, 0, []
        while True:
            size = size_after(position)
            plateaus.append((first, position, size))
            if size == self.largest:
                return plateaus
            # The last step that still begins within the share, then one more; the division may round either way.
            end = ((size - ramp.start) // ramp.step + 1) * share
            steps = max(int((end - position) / size) - 1, 1)
            while size_after(position + steps * size) == size:
                steps += 1
            first, position = first + steps, position + steps * size

    def sizes(self) -> Iterator[int]:
        """Yield every size that occurs, once each."""
        ramp = self._table.batch_ramp
        if ramp is not None and ramp.every is None:
            yield from dict.fromkeys(size for _, _, size in self._by_samples)
            return
        if ramp is not None:
            yield from takewhile(lambda size: size < self.largest, range(ramp.start, self.largest, ramp.step))
        yield self.largest

    def check(self, manifest: Manifest, parts: str = "data-parallel ranks") -> None:
        """Refuse sizes that cannot be split into micro-batches for every data-parallel rank.

        Args:
            manifest: Of the run.
            parts: What `degree` is a number of, in words.

        Raises:
            ManifestError: At the line of the size.
        """
        unit = self._microbatch * self._degree
        # Where the first two and the last divide, those between do: they are multiples of one number from each other.
        ramp = self._table.batch_ramp
        second = () if ramp is None else (min(ramp.start + ramp.step, self.largest),)
        for size in dict.fromkeys((next(self.sizes()), *second, self.largest)):
            if size % unit:
                key = ("batch_ramp",) if size < self.largest else ("global_batch",)
                fits = [str(n) for n in (size - size % unit, size - size % unit + unit) if n]
                message = (
                    f"a global batch of {size} sequences does not divide into micro-batches of {self._microbatch} on "
                    f"{self._degree} {parts} ({self._microbatch} x {self._degree} = {unit})"
                )
                problem = manifest.document.problem(("train", *key), message, hint=f"use {' or '.join(fits)}")
                raise ManifestError([problem])
