"""`order = "stream"`: samples in the order of an iterable, which keeps its own position."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import torch

from composer3d.composition import local_slice
from composer3d.errors import DataError
from composer3d.manifest import hide
from composer3d.runner.data.collate import Batch, collate, padded_width
from composer3d.runner.data.data_source import Sample
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.inputs import named_leaves, num_rows
from composer3d.runner.data.items import as_sample

__all__ = ["STREAM_LOSES", "Comparison", "StreamBatches", "StreamSource"]

Comparison: TypeAlias = Callable[[int, Sequence[int]], None]

STREAM_LOSES = (
    'order = "stream" takes the data as the iterable gives it: step n cannot be computed without the steps before it, '
    "nothing is shuffled, every data-parallel rank reads the whole stream to keep its part, no samples are held out "
    "for evaluation, and resuming is as exact as the iterable's own state_dict()"
)


class StreamSource:
    """Items of an iterable with `state_dict` and `load_state_dict`; each pass over it is an epoch.

    Args:
        dataset: The iterable. `state_dict()` must say where the item after the last one yielded is.
        table: The manifest's `[data]`.

    Raises:
        DataError: It is a map-style data set, no iterable, or has no state.
    """

    evaluation = None

    def __init__(self, dataset: Any, table: DataTable) -> None:
        kind = type(dataset).__name__
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            raise DataError(
                f'[data] use = "{table.use}" gives numbered samples ({kind}); order = "stream" is for iterables: '
                'take "shuffle" or "sequential"'
            )
        if not hasattr(dataset, "__iter__"):
            raise DataError(
                f'[data] use = "{table.use}" gives a value of type {kind}; order = "stream" needs an iterable'
            )
        missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(dataset, name, None))]
        if missing:
            lacking = " and ".join(f"{name}()" for name in missing)
            raise DataError(
                f'[data] use = "{table.use}" gives an iterable of type {kind} without {lacking}: '
                "a resumed run would begin the stream again and train twice on the same samples; add them, or return "
                "a map-style data set with __len__ and __getitem__"
            )
        self.vocab_size = table.vocab_size
        self._dataset, self._table = dataset, table
        self._iterator: Iterator[Any] | None = None
        self._num_items = 0
        self._seen: tuple[Sample, dict[str, Any]] | None = None

    def peek(self) -> Sample:
        """Return the sample that `take` will return next; the state stays that before it.

        Raises:
            DataError: A pass gives nothing.
        """
        if self._seen is None:
            before = self.state_dict()
            self._seen = self.take(), before
            self._num_items -= 1
        return self._seen[0]

    def take(self) -> Sample:
        """Return the next sample, from the next pass if this one has ended.

        Raises:
            DataError: A pass gives nothing.
        """
        if self._seen is not None:
            sample, self._seen = self._seen[0], None
            self._num_items += 1
            return sample
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._dataset)
            try:
                item = next(self._iterator)
            except StopIteration:
                # A loaded state may lie at the end of a pass, so only the second empty pass in a row is an error.
                self._iterator = None
                continue
            self._num_items += 1
            return as_sample(item, name=f"item {self._num_items - 1} of the stream", use=self._table.use)
        raise DataError(f'[data] use = "{self._table.use}" is empty: a pass over it gives no item')

    @property
    def num_items(self) -> int:
        """Return how many items were taken, over all passes."""
        return self._num_items

    def record(self) -> dict[str, Any]:
        """Return the reference and its arguments; the number of samples is unknown."""
        return {
            "kind": "stream",
            "use": self._table.use,
            "args": hide(self._table.args),
            "num_samples": None,
            "num_evaluation_samples": 0,
            "tokenizer": None,
            "vocab_size": self.vocab_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream is: the same on every rank."""
        if self._seen is not None:
            return deepcopy(self._seen[1])
        return {"num_items": self._num_items, "dataset": deepcopy(self._dataset.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved place."""
        self._dataset.load_state_dict(deepcopy(state["dataset"]))
        self._num_items = int(state["num_items"])
        self._iterator = None
        self._seen = None


class StreamBatches:
    """Batches of a stream, in order: every rank reads the global batch and keeps its contiguous part.

    So a step has the same samples in every layout, and the state is the same on every rank: a run may resume with
    another number of ranks. The price is that each rank reads the whole stream.

    Args:
        source: Yields samples, the same in the same order on every rank.
        table: The manifest's `[data]`.
        rank: Data-parallel rank.
        degree: Data-parallel degree.
        num: As of the loader.
        batch_size_of: The global batch of a step.
        compare: Called with the number of the first item of a batch and a number for each item, to compare with those
            of other ranks.
    """

    def __init__(
        self,
        source: StreamSource,
        table: DataTable,
        *,
        rank: int,
        degree: int,
        num: int = 1,
        batch_size_of: Callable[[int], int],
        compare: Comparison | None = None,
    ) -> None:
        self._source, self._table, self._compare = source, table, compare
        self._rank, self._degree, self._num, self._batch_size_of = rank, degree, num, batch_size_of
        self.next_step = 0

    def assemble(self, step: int) -> Batch:
        """Return the batch of the next step.

        Raises:
            DataError: It is another step's turn.
        """
        if step != self.next_step:
            raise DataError(
                f'[data] order = "stream" gives the steps in order: step {self.next_step} is next, and step {step} was '
                "asked for; load the state that was saved with the checkpoint"
            )
        first, size = self._source.num_items, self._batch_size_of(step)
        mine = local_slice(range(size), self._rank, self._degree, num=self._num)
        kept: list[Sample] = []
        lengths: list[int] = []
        seen: list[int] = []
        for place in range(size):
            sample = self._source.take()
            if self._compare is not None:
                seen.append(_checksum(sample))
            lengths.append(num_rows(sample[0]))
            if place in mine:
                kept.append(sample)
        if self._compare is not None:
            self._compare(first, seen)
        width = padded_width(lengths, self._table)
        numbers = [first + place for place in mine]
        batch = collate(kept, step=step, indices=numbers, width=width, table=self._table)
        self.next_step = step + 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's place."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Go on at a saved place, with the step that came next there."""
        self._source.load_state_dict(state)
        self.next_step = step


def _checksum(sample: Sample) -> int:
    found = 0
    for name, tensor in (*named_leaves(sample[0], "inputs"), *named_leaves(sample[1], "targets")):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found
