"""Batches of one data-parallel rank, by step in any order, read in this process or ahead by workers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from composer3d.errors import ComposerError, DataError
from composer3d.runner.data.batches import MapBatches, can_be_ignored, num_batches
from composer3d.runner.data.collate import Batch, check_vocabulary
from composer3d.runner.data.data_source import IGNORED, Source
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.stream import Comparison, StreamBatches, StreamSource
from composer3d.runner.data.user_data import seeded

__all__ = ["Loader"]

_NUM_CHECKED = 16
_PREFETCH = 2

log = logging.getLogger(__name__)


class Loader:
    """Gives `batch(step)`: a function of seed and step alone, the same for any number of workers and ranks.

    Workers make whole batches, each every workers-th step, ahead of the training; they are started at the first batch
    and again when a step other than the next one is requested. A stream is read here and yields its steps in order.

    Args:
        source: From `open_source`.
        table: The manifest's `[data]`.
        seed: Of the run.
        rank: Data-parallel rank; ranks with the same one receive the same batches.
        degree: Data-parallel degree.
        num: Where ranks read different numbers of samples: `degree` is that of equal pieces, `rank` the first of this
            rank's, and this their number.
        evaluated: Rank and degree by which batches of an evaluation are divided, of one model alone where there are
            several; default: as those of steps.
        batch_size_of: The global batch of a step, in samples.
        position_of: Samples before a step: the sum of the batches of all steps before it.
        compare: Of a stream: compares what this rank read with the other ranks; see `compare_streams`.
        ignored: The target that carries no loss.
        vocab_size: Of the model; the first 16 batches are checked against it. None checks nothing.

    Raises:
        DataError: The tokenizer has more tokens than the model, or pin_memory is set without an accelerator.

    Memory: (prefetch x workers + 1) batches. Collectives: none.
    """

    def __init__(
        self,
        source: Source | StreamSource,
        table: DataTable,
        *,
        seed: int,
        rank: int,
        degree: int,
        batch_size_of: Callable[[int], int],
        position_of: Callable[[int], int],
        num: int = 1,
        evaluated: tuple[int, int] | None = None,
        compare: Comparison | None = None,
        ignored: int = IGNORED,
        vocab_size: int | None = None,
    ) -> None:
        self._source, self._table, self._seed = source, table, seed
        self._slice: dict[str, Any] = {"rank": rank, "degree": degree, "num": num}
        self._vocab_size = vocab_size
        self._evaluated = self._slice if evaluated is None else {"rank": evaluated[0], "degree": evaluated[1]}
        _refuse(source, table, vocab_size)
        self._batches: MapBatches | StreamBatches
        if isinstance(source, StreamSource):
            self._batches = StreamBatches(source, table, **self._slice, batch_size_of=batch_size_of, compare=compare)
        else:
            self._batches = MapBatches(
                source,
                table,
                seed=seed,
                **self._slice,
                batch_size_of=batch_size_of,
                position_of=position_of,
            )
            if rank == 0:
                _warn_of_repeated_samples(source, table, batch_size_of(0))
        self._ahead: Iterator[Any] | None = None
        self._ignored, self._has_told = ignored, False
        self._next_step = 0
        self._num_unchecked = _NUM_CHECKED

    def batch(self, step: int) -> Batch:
        """Return this rank's batch of a step.

        Raises:
            BatchError: The global batch of the step does not divide by the degree.
            DataError: A sample cannot be used; a stream was asked for another step than its next one.
        """
        batch = self._from_workers(step) if self._table.workers else self._batches.assemble(step)
        if self._vocab_size is not None and self._num_unchecked:
            check_vocabulary(batch, vocab_size=self._vocab_size)
            self._num_unchecked -= 1
        self._next_step = step + 1
        return batch.pin_memory() if self._table.pin_memory and not self._table.workers else batch

    def evaluation_batches(self, num: int | None = None, *, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's batches of the samples held out, in their order, the same ones each time.

        The last batch is filled up with rows without loss, so that every sample counts once. They are read here,
        without workers.

        Args:
            num: How many global batches; None is all of them.
            batch_size: Samples of a global batch.

        Raises:
            DataError: Nothing is held out, or targets that are not integers do not fill the last batch.
        """
        evaluation = self._source.evaluation
        if evaluation is None:
            raise DataError(_no_evaluation(self._source, self._table))
        total, rest = num_batches(len(evaluation), batch_size), len(evaluation) % batch_size
        if rest and total > 1 and not can_be_ignored(_first_targets(evaluation, self._seed)):
            # Nothing marks a row of such targets as without loss, so a batch cannot be filled up.
            total -= 1
            if not self._has_told and (num is None or num > total):
                log.warning(
                    "[data] %d of the %d samples held out fill no batch and are not evaluated", rest, len(evaluation)
                )
            self._has_told = True
        batches = MapBatches(
            evaluation,
            self._table,
            seed=self._seed,
            **self._evaluated,
            batch_size_of=lambda step: batch_size,
            position_of=lambda step: step * batch_size,
            once=True,
            ignored=self._ignored,
        )
        for number in range(total if num is None else min(num, total)):
            yield batches.assemble(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the next step, the values that the order depends on, and the position of a stream."""
        state: dict[str, Any] = {"step": self._next_step, **self._dependencies()}
        state |= {"modified": modified} if (modified := self._modified()) else {}
        if isinstance(self._batches, StreamBatches):
            state["stream"] = self._batches.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, in any layout; the log warns if the data are now others.

        Raises:
            DataError: One of the two is a stream and the other is not.
        """
        is_stream = isinstance(self._batches, StreamBatches)
        if is_stream != ("stream" in state):
            was, now = ("a numbered data set", "a stream") if is_stream else ("a stream", "a numbered data set")
            raise DataError(f"[data] the checkpoint was trained on {was}, and this run reads {now}; start a new run")
        for key, mine in self._dependencies().items():
            if state.get(key) != mine:
                log.warning(
                    "[data] %s was %r when the checkpoint was saved and is %r now: the order of the samples is another",
                    key,
                    state.get(key),
                    mine,
                )
        changed = [name for name, when in self._modified().items() if state.get("modified", {}).get(name, when) != when]
        if changed:
            log.warning(
                "[data] changed since the checkpoint was saved, and too large to be compared whole: %s; sizes and 64 "
                "blocks of each are as they were, other samples may not be",
                ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else ""),
            )
        self._next_step, self._ahead = int(state["step"]), None
        if isinstance(self._batches, StreamBatches):
            self._batches.load_state_dict(state["stream"], step=self._next_step)

    def close(self) -> None:
        """End the workers."""
        self._ahead = None

    def _modified(self) -> dict[str, int]:
        return {} if isinstance(self._source, StreamSource) else self._source.modified

    def _dependencies(self) -> dict[str, Any]:
        size = None if isinstance(self._source, StreamSource) else len(self._source)
        facts = {} if isinstance(self._source, StreamSource) else self._source.order_facts()
        return {
            "seed": self._seed,
            "num_samples": size,
            "order": self._table.order,
            "bucket": self._table.bucket,
            **facts,
        }

    def _from_workers(self, step: int) -> Batch:
        if self._ahead is None or step != self._next_step:
            self._ahead = None
            self._ahead = self._start_workers(step)
        batch = next(self._ahead)
        if isinstance(batch, ComposerError):
            self._ahead = None
            raise batch
        assert isinstance(batch, Batch) and batch.step == step
        return batch

    def _start_workers(self, step: int) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            _Steps(self._batches.assemble),
            batch_size=None,
            sampler=count(step),
            num_workers=self._table.workers,
            prefetch_factor=self._table.prefetch or _PREFETCH,
            collate_fn=_unchanged,
            pin_memory=self._table.pin_memory,
            # Its own generator: torch's loader would draw the workers' seed from the global one.
            generator=torch.Generator().manual_seed(self._seed),
            multiprocessing_context="fork",
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork of a process with threads; a worker runs on one thread of its own.
            warnings.simplefilter("ignore", DeprecationWarning)
            return iter(loader)


class _Steps(Dataset[Any]):
    """The batches as a data set whose items are steps; errors meant for the user come back as values, unchanged."""

    def __init__(self, assemble: Callable[[int], Batch]) -> None:
        self._assemble = assemble

    def __getitem__(self, step: int) -> Batch | ComposerError:
        try:
            return self._assemble(step)
        except ComposerError as error:
            return error


def _first_targets(source: Source, seed: int) -> Any:
    with seeded(seed, 0):
        return source[0][1]


def _unchanged(batch: Any) -> Any:
    return batch


def _refuse(source: Source | StreamSource, table: DataTable, vocab_size: int | None) -> None:
    if table.pin_memory and not torch.accelerator.is_available():
        raise DataError("[data] pin_memory = true needs an accelerator, and this machine has none; remove it")
    if vocab_size is not None and source.vocab_size is not None and source.vocab_size > vocab_size:
        raise DataError(
            f'[data] use = "{table.use}" has tokens up to {source.vocab_size - 1}, and the model\'s vocab_size = '
            f"{vocab_size} allows 0 to {vocab_size - 1}; set the model's vocab_size to at least {source.vocab_size}"
        )


def _warn_of_repeated_samples(source: Source, table: DataTable, batch_size: int) -> None:
    if len(source) >= batch_size:
        return
    held_out = len(source.evaluation or ())
    rest = f", and {held_out} held out (evaluation_fraction = {table.evaluation_fraction:g})" if held_out else ""
    log.warning(
        '[data] use = "%s" has %d samples to train on%s: a global batch of %d holds some of them twice',
        table.use,
        len(source),
        rest,
        batch_size,
    )


def _no_evaluation(source: Source | StreamSource, table: DataTable) -> str:
    if isinstance(source, StreamSource):
        return '[data] order = "stream" holds no samples out, so there is nothing to evaluate on; remove [evaluation]'
    if not table.evaluation_fraction:
        return "[data] evaluation_fraction = 0 holds no samples out; raise it, or remove [evaluation]"
    return f'[data] use = "{table.use}" has 1 sample, so none is held out; give more data, or remove [evaluation]'
