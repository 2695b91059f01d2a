"""Batches of a numbered source: read this rank's samples, pad them as the global batch needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from composer3d.composition import local_slice
from composer3d.errors import DataError
from composer3d.runner.data.collate import Batch, collate, padded_width
from composer3d.runner.data.data_source import IGNORED, Sample, Source
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.inputs import num_rows
from composer3d.runner.data.order import Order
from composer3d.runner.data.user_data import seeded

__all__ = ["MapBatches", "can_be_ignored", "num_batches"]


def num_batches(num_samples: int, batch_size: int) -> int:
    """Return the batches that hold every sample once, the last one perhaps not full."""
    return -(-num_samples // batch_size)


def can_be_ignored(targets: object) -> bool:
    """Return whether a row can be marked as without loss: one tensor of integers can, to which a loss has a mark."""
    return isinstance(targets, torch.Tensor) and not targets.is_floating_point() and not targets.is_complex()


def unfilled(num_samples: int, batch_size: int, targets: object) -> str:
    """Return the message for samples held out that are fewer than a batch, and whose targets cannot be ignored."""
    kind = f"{targets.dtype} targets" if isinstance(targets, torch.Tensor) else "such targets"
    return (
        f"[data] {num_samples} samples held out do not fill a batch of {batch_size}, and {kind} cannot be marked as "
        "without loss; hold out more (evaluation_fraction), or lower global_batch"
    )


class MapBatches:
    """Builds the batch of any step; it has no position, so that several processes may use it.

    Padding to the longest sample is to that of the *global* batch, so that rows are equal in every layout. Lengths come
    from the source's `lengths`; without them, samples are read for their length alone: the other ranks' samples of
    the step, and with `bucket` all samples of the window, on every rank.

    Args:
        source: Numbered samples.
        table: The manifest's `[data]`.
        seed: Of the run.
        rank: Data-parallel rank.
        degree: Data-parallel degree.
        num: As of the loader.
        batch_size_of: The global batch of a step.
        position_of: Samples before a step.
        once: One pass in the order of the source, its last batch filled up: for evaluation.
        ignored: The target that carries no loss, with which it is filled up.
    """

    def __init__(
        self,
        source: Source,
        table: DataTable,
        *,
        seed: int,
        rank: int,
        degree: int,
        num: int = 1,
        batch_size_of: Callable[[int], int],
        position_of: Callable[[int], int],
        once: bool = False,
        ignored: int = IGNORED,
    ) -> None:
        self._source, self._table, self._seed = source, table, seed
        self._rank, self._degree, self._num = rank, degree, num
        self._batch_size_of, self._position_of, self._once = batch_size_of, position_of, once
        self._ignored = ignored
        self._order = Order(
            source,
            table,
            seed=seed,
            batch_size_of=batch_size_of,
            position_of=position_of,
            length_of=self._length,
        )

    def assemble(self, step: int) -> Batch:
        """Return this rank's batch of a step.

        Raises:
            BatchError: The global batch does not divide by the degree.
            DataError: A sample cannot be used.
        """
        if self._once:
            first = self._position_of(step)
            positions = list(range(first, first + self._batch_size_of(step)))
            samples = [position if position < len(self._source) else -1 for position in positions]
        else:
            places = self._order.positions(step)
            positions, samples = places.tolist(), self._order.samples(places).tolist()
        mine = local_slice(range(len(samples)), self._rank, self._degree, num=self._num)
        read = {place: self._read(positions[place], samples[place]) for place in mine}
        width = padded_width(self._lengths(positions, samples, read), self._table)
        indices = [samples[place] for place in mine]
        return collate(list(read.values()), step=step, indices=indices, width=width, table=self._table)

    def _lengths(self, positions: Sequence[int], samples: Sequence[int], read: dict[int, Sample]) -> list[int]:
        if self._table.padding not in ("longest", "multiple"):
            return []
        return [
            num_rows(read[place][0])
            if self._source.lengths is None and place in read
            else self._length(position, sample)
            for place, (position, sample) in enumerate(zip(positions, samples, strict=True))
        ]

    def _length(self, position: int, sample: int) -> int:
        lengths = self._source.lengths
        if lengths is not None:
            return int(lengths[max(sample, 0)])
        return num_rows(self._read(position, sample)[0])

    def _read(self, position: int, sample: int) -> Sample:
        with seeded(self._seed, position) if self._source.draws else nullcontext():
            inputs, targets = self._source[max(sample, 0)]
        if sample >= 0:
            return inputs, targets
        if not can_be_ignored(targets):
            raise DataError(unfilled(len(self._source), self._batch_size_of(0), targets))
        return inputs, torch.full_like(targets, self._ignored)
