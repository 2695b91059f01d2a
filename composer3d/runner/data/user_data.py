"""Data sets of one's own: `use = "module:callable"`."""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from composer3d.errors import DataError, ReferenceFailure, describe_error, is_interrupt
from composer3d.manifest import hide, resolve_reference
from composer3d.runner.data.data_source import Report, Sample, Source, num_held_out
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.items import as_sample, is_row
from composer3d.runner.data.prepare import launch_key, prepare_once
from composer3d.runner.data.stream import StreamSource

__all__ = ["UserSource", "call_user", "open_user", "seeded", "source_of"]


class UserSource(Source):
    """Samples of a map-style data set, or of a part of it.

    Args:
        dataset: Has `__len__` and `__getitem__`, and may have `lengths`: the tokens of each item.
        table: The manifest's `[data]`.
        first: The first item of this source.
        num_samples: How many items.
        evaluation: The samples held out.
    """

    def __init__(
        self, dataset: Any, table: DataTable, *, first: int, num_samples: int, evaluation: Source | None = None
    ) -> None:
        super().__init__(vocab_size=table.vocab_size, evaluation=evaluation)
        self._dataset, self._table, self._first, self._num_samples = dataset, table, first, num_samples
        self._lengths: NDArray[np.int64] | None = None
        lengths = getattr(dataset, "lengths", None)
        if lengths is not None:
            # An item that is one row of tokens gives one target fewer than it has tokens.
            with seeded(0, 0):
                shorter = int(is_row(dataset[0]))
            self._lengths = np.asarray(lengths, dtype=np.int64)[first : first + num_samples] - shorter

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """Return the data set's `lengths`."""
        return self._lengths

    @property
    def draws(self) -> bool:
        """Augmentation may draw; it is seeded, so that it does not depend on the layout or the workers."""
        return True

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        number = self._first + index
        return as_sample(self._dataset[number], name=f"item {number}", use=self._table.use)

    def record(self) -> dict[str, Any]:
        """Return the reference, its arguments, the counts and what the data set records of itself."""
        record = getattr(self._dataset, "record", None)
        return {
            "kind": "user",
            "use": self._table.use,
            "args": hide(self._table.args),
            "num_samples": len(self),
            "num_evaluation_samples": len(self.evaluation) if self.evaluation is not None else 0,
            "tokenizer": None,
            "vocab_size": self.vocab_size,
            **({"dataset": hide(record())} if callable(record) else {}),
        }


@contextmanager
def seeded(seed: int, position: int) -> Iterator[None]:
    """Seed the random streams of torch (CPU), numpy and Python by a place in the stream of samples, then restore them.

    Args:
        seed: Of the run.
        position: Of the sample in the endless stream; the next epoch draws again.
    """
    word = int.from_bytes(blake2b(f"sample {seed} {position}".encode(), digest_size=8).digest(), "little")
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    random.seed(word)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def open_user(
    table: DataTable, *, folder: Path, cache: Path, report: Report, rank: int = 0
) -> UserSource | StreamSource:
    """Call the user's callable and return a source over its result.

    A data set with a method `prepare` has it called first, on one rank of each node and once per launch.

    Raises:
        DataError: The reference leads nowhere, the call fails, or the result cannot do what `order` needs.
    """
    dataset = call_user(table, folder)
    if callable(getattr(dataset, "prepare", None)):
        _prepare(dataset, table, cache=cache, report=report, rank=rank)
    return source_of(dataset, table)


def source_of(dataset: Any, table: DataTable) -> UserSource | StreamSource:
    """Return a source over what the user's callable has returned.

    Raises:
        DataError: It cannot do what `order` needs.
    """
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if table.order == "stream":
        return StreamSource(dataset, table)
    if not is_map:
        raise DataError(_not_a_map(dataset, table))
    total = len(dataset)
    if total == 0:
        raise DataError(f'[data] use = "{table.use}" is empty: its length is 0')
    lengths = getattr(dataset, "lengths", None)
    if lengths is not None and len(lengths) != total:
        raise DataError(f'[data] use = "{table.use}" has {total} items and {len(lengths)} `lengths`; give one for each')
    num_evaluation = num_held_out(total, table.evaluation_fraction)
    evaluation = None
    if num_evaluation:
        evaluation = UserSource(dataset, table, first=total - num_evaluation, num_samples=num_evaluation)
    return UserSource(dataset, table, first=0, num_samples=total - num_evaluation, evaluation=evaluation)


def _not_a_map(dataset: Any, table: DataTable) -> str:
    kind = type(dataset).__name__
    if hasattr(dataset, "__iter__"):
        return (
            f'[data] use = "{table.use}" gives an iterable of type {kind}, which has no numbered samples to put in '
            'order; return a data set with __len__ and __getitem__, or set order = "stream"'
        )
    return f'[data] use = "{table.use}" gives a value of type {kind}; return a data set with __len__ and __getitem__'


def call_user(table: DataTable, folder: Path) -> Any:
    """Call the user's callable and return its result.

    Raises:
        DataError: The reference leads nowhere, or the call fails.
    """
    try:
        factory = resolve_reference(table.use, folder)
    except ReferenceFailure as failure:
        raise DataError(f'[data] use = "{table.use}": {failure}') from failure.__cause__
    if not callable(factory) or inspect.isbuiltin(factory):
        why = "is built into Python" if callable(factory) else "cannot be called"
        raise DataError(f'[data] use = "{table.use}" is a value of type {type(factory).__name__}, which {why}')
    try:
        inspect.signature(factory).bind(**table.args)
    except TypeError as error:
        names = ", ".join(inspect.signature(factory).parameters) or "no arguments"
        raise DataError(f'[data.args] of use = "{table.use}": {error}; it takes {names}') from None
    except ValueError:  # a builtin without a signature: the call itself tells
        pass
    try:
        return factory(**table.args)
    except BaseException as error:
        if isinstance(error, DataError) or is_interrupt(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = describe_error(error)
        raise DataError(
            f'[data] use = "{table.use}" fails when called, at {Path(last.filename).name}:{last.lineno}: {said}'
        ) from error


def _prepare(dataset: Any, table: DataTable, *, cache: Path, report: Report, rank: int) -> None:
    name = blake2b(f"{table.use} {sorted(table.args.items())!r}".encode(), digest_size=16).hexdigest()
    marker = cache / f"prepared-{name}"
    key = launch_key()

    def work() -> None:
        dataset.prepare()
        marker.write_text(key)

    prepare_once(
        work,
        done=lambda: marker.exists() and marker.read_text() == key,
        lock_path=marker.with_suffix(".lock"),
        what=f'"{table.use}"',
        report=report,
        rank=rank,
    )
