"""Samples of every step: the stream of the seed, or its windows sorted by length."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from composer3d.composition import indices
from composer3d.errors import BatchError
from composer3d.runner.data.data_source import Source
from composer3d.runner.data.data_table import DataTable

__all__ = ["Order"]


class Order:
    """The global batch of a step, as positions in the endless stream and as samples: a function of seed and step.

    With `bucket = n`, the samples of each window of n steps are sorted by length and dealt to the steps of that window
    in a shuffled order. A sample stays in its window, so each is met once an epoch, give or take a window at the seam
    of two epochs.

    Args:
        source: Says which samples stand at which positions.
        table: Has the order and the windows.
        seed: Of the run.
        batch_size_of: The global batch of a step.
        position_of: The stream position of a step's first sample: the sum of the batches before it.
        length_of: The tokens of (position, sample); called for whole windows.
    """

    def __init__(
        self,
        source: Source,
        table: DataTable,
        *,
        seed: int,
        batch_size_of: Callable[[int], int],
        position_of: Callable[[int], int],
        length_of: Callable[[int, int], int],
    ) -> None:
        self._source, self._table, self._seed = source, table, seed
        self._batch_size_of, self._position_of, self._length_of = batch_size_of, position_of, length_of
        self._window: tuple[int, dict[int, NDArray[np.int64]]] = (-1, {})

    def positions(self, step: int) -> NDArray[np.int64]:
        """Return the positions of a step's samples.

        Raises:
            BatchError: The step's batch is empty.
        """
        if self._batch_size_of(step) < 1:
            raise BatchError(f"step {step} has a global batch of {self._batch_size_of(step)} samples; use at least 1")
        if not self._table.bucket:
            start = self._position_of(step)
            return np.arange(start, start + self._batch_size_of(step), dtype=np.int64)
        number = step // self._table.bucket
        if self._window[0] != number:
            self._window = (number, self._deal(number))
        return self._window[1][step]

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ascending or other positions, which must lie close together."""
        return self._source.samples_at(positions, seed=self._seed, shuffle=self._table.order == "shuffle")

    def _deal(self, number: int) -> dict[int, NDArray[np.int64]]:
        """Sort a window by length and divide it into the batches of its steps."""
        num_steps = self._table.bucket
        steps = range(number * num_steps, (number + 1) * num_steps)
        end = self._position_of(steps[-1]) + self._batch_size_of(steps[-1])
        positions = np.arange(self._position_of(steps[0]), end, dtype=np.int64)
        samples = self.samples(positions)
        lengths = [self._length_of(int(p), int(s)) for p, s in zip(positions, samples, strict=True)]
        positions = positions[np.argsort(lengths, kind="stable")]
        # Another stream than that of the samples, with the window as its epoch.
        seed = int.from_bytes(blake2b(f"bucket {self._seed}".encode(), digest_size=8).digest(), "little")
        dealt, start = {}, 0
        for place in indices(number * num_steps, num_steps, size=num_steps, seed=seed).tolist():
            size = self._batch_size_of(steps[place])
            dealt[steps[place]] = positions[start : start + size]
            start += size
        return dealt
