"""Example inputs of the model before any batch is read: shapes and dtypes, for plugins that trace the model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer3d import map_tensors
from composer3d.errors import DataError, describe_error, is_interrupt
from composer3d.processes import running
from composer3d.runner.data.batches import can_be_ignored, unfilled
from composer3d.runner.data.collate import collate, padded_width
from composer3d.runner.data.data_source import Sample, Source, num_held_out
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.inputs import Inputs, call_of, num_rows
from composer3d.runner.data.items import as_sample
from composer3d.runner.data.paths import locate
from composer3d.runner.data.stream import StreamSource
from composer3d.runner.data.tokens import map_token_file
from composer3d.runner.data.user_data import call_user, seeded, source_of

__all__ = [
    "Example",
    "example_of",
    "first_samples",
    "foreseen_batch",
    "foreseen_example",
    "unfilled_evaluation",
]

Example = tuple[tuple[Any, ...], dict[str, Any]]
# Not one sample: in a model's shapes, a dim of 1 cannot be distinguished from one that is broadcast.
_LEAST_SAMPLES = 2
# How much of token files is read for the largest token: this many tokens, in parts that are spread over each file.
_SEARCHED_TOKENS, _SEARCHED_PARTS = 1 << 24, 64


def example_of(source: Source | StreamSource, table: DataTable, *, seed: int, num_samples: int) -> Example:
    """Return `(args, kwargs)` of a forward like the run's first: the first sample's form, on meta.

    Nothing is consumed: a numbered source has no place, a stream gives the sample that was looked at once more, and
    random streams are as before.

    Args:
        source: From `open_source`.
        table: The manifest's `[data]`.
        seed: Of the run.
        num_samples: Of a micro-batch.
    """
    if isinstance(source, StreamSource):
        inputs = source.peek()[0]
    else:
        with seeded(seed, 0) if source.draws else nullcontext():
            inputs = source[0][0]
    return _batch(inputs, table, num_samples)


def foreseen_example(table: DataTable, folder: Path, *, seed: int, num_samples: int) -> Example | None:
    """Return the same without opening the source, as far as it can be foreseen; see `foreseen_batch`."""
    found = foreseen_batch(table, folder, seed=seed, num_samples=num_samples)
    return None if found is None else found[0]


def foreseen_batch(table: DataTable, folder: Path, *, seed: int, num_samples: int) -> tuple[Example, Any] | None:
    """Return an example and the form of its targets: text and tokens are `seq_len` integers, a user's data set is made.

    Of that the first item is looked at. A data set that has to `prepare` before it has items may have a method
    `example`, which returns one that is like them and reads nothing; without it nothing can be foreseen: None.

    Args:
        table: The manifest's `[data]`.
        folder: Of the manifest.
        seed: Of the run.
        num_samples: Of a micro-batch.

    Raises:
        DataError: The user's callable fails, or `example` does.
    """
    table = table.sources[0]
    sample = _foreseen_sample(table, folder, seed)
    if sample is None:
        return None
    inputs, targets = sample
    example = _batch(inputs, table, num_samples)
    # A class of an image is padded to nothing; a target for every token is.
    is_alike = isinstance(inputs, Tensor) and isinstance(targets, Tensor) and targets.shape[:1] == inputs.shape[:1]
    size = max(num_samples, _LEAST_SAMPLES)
    return example, map_tensors(lambda tensor: _padded(tensor, table if is_alike else None, size), targets)


def first_samples(table: DataTable, folder: Path, *, seed: int, vocab_size: int | None) -> Sample | None:
    """Return two samples with values, stacked, without preparing anything; None where that cannot be.

    Of text the tokens are the largest that there may be, at every place: a model without rows for them fails. Of token
    files they are the largest that is found in up to 2^24 of their tokens.

    Args:
        table: The manifest's `[data]`.
        folder: Of the manifest.
        seed: Of the run.
        vocab_size: Tokens are below it; None where unknown.

    Raises:
        DataError: An item of a user's data set is none that a run takes, or two of them cannot be stacked.
    """
    if table.sources[0].kind == "user":
        return _first_of_user(table.sources[0], folder, seed)
    bounds = [_bound_of_files(part, folder) or 1 for part in table.sources if part.kind == "path"]
    largest = (vocab_size or max(bounds, default=1)) - 1
    rows = torch.full((2, table.seq_len + 1), largest, dtype=torch.int64)
    if names := _told(table):
        # One document in one row, every token one in the other; all that a model is told of these is small numbers.
        numbers = torch.stack([torch.zeros(table.seq_len, dtype=torch.int64), torch.arange(table.seq_len)])
        return Inputs(args=(rows[:, :-1],), kwargs=dict.fromkeys(names, numbers)), rows[:, 1:]
    return rows[:, :-1], rows[:, 1:]


def unfilled_evaluation(table: DataTable, folder: Path, *, batch_size: int, targets: Any) -> str | None:
    """Return what an evaluation refuses: samples held out that fill no batch, of targets that cannot be ignored.

    Args:
        table: The manifest's `[data]`; other data than a user's has targets that can.
        folder: Of the manifest.
        batch_size: Samples of a global batch.
        targets: Of first samples, stacked.
    """
    if table.kind != "user" or table.order == "stream" or can_be_ignored(targets):
        return None
    dataset = call_user(table, folder)
    if not hasattr(dataset, "__len__"):
        return None
    num_samples = num_held_out(len(dataset), table.evaluation_fraction)
    return unfilled(num_samples, batch_size, targets) if 0 < num_samples < batch_size else None


def _told(table: DataTable) -> list[str]:
    """Return the arguments of the model by which it is told of documents."""
    told = table.told
    return [] if told is None else [name for name in (told.positions, told.numbers) if name is not None]


def _bound_of_files(table: DataTable, folder: Path) -> int | None:
    """Return below what the tokens of files are, as far as they are read; None for other data."""
    try:
        located = locate(table.use, folder=folder)
        if located.kind != "tokens":
            return None
        files = [map_token_file(file, table) for file in located.files]
    except (DataError, OSError):  # the run opens them, and tells
        return None
    size = max(_SEARCHED_TOKENS // (_SEARCHED_PARTS * len(files)), 1)
    starts = [(file, place) for file in files for place in range(0, len(file), max(len(file) // _SEARCHED_PARTS, size))]
    return 1 + max(int(file[place : place + size].max()) for file, place in starts)


def _first_of_user(table: DataTable, folder: Path, seed: int) -> Sample | None:
    try:
        dataset = call_user(table, folder)
        is_prepared = callable(getattr(dataset, "prepare", None))
        if not is_prepared:
            source_of(dataset, table)
        with seeded(seed, 0):
            if callable(getattr(dataset, "example", None)):
                items = [dataset.example()] * 2
            elif is_prepared:
                return None
            else:
                items = _first_items(dataset)
    except DataError:
        raise
    except Exception:  # the run opens it as it has to be, and tells
        return None
    samples = [as_sample(item, name="the first item", use=table.use) for item in items]
    try:
        width = padded_width([num_rows(inputs) for inputs, _ in samples], table)
        batch = collate(samples, step=0, indices=(0, 1), width=width, table=table)
    except DataError:
        raise
    except Exception:  # the run opens it as it has to be, and tells
        return None
    return batch.inputs, batch.targets


def _first_items(dataset: Any) -> list[Any]:
    return [dataset[0], dataset[1]] if hasattr(dataset, "__getitem__") else [next(iter(dataset))] * 2


def _foreseen_sample(table: DataTable, folder: Path, seed: int) -> Sample | None:
    if table.kind != "user":
        row = torch.empty(table.seq_len, dtype=torch.int64, device="meta")
        names = _told(table)
        return (Inputs(args=(row,), kwargs=dict.fromkeys(names, row)) if names else row), row
    with running("called", table.use):
        return _sample_of_user(table, folder, seed)


def _sample_of_user(table: DataTable, folder: Path, seed: int) -> Sample | None:
    dataset = call_user(table, folder)
    if callable(getattr(dataset, "example", None)):
        return _stated(dataset, table, seed)
    try:
        with seeded(seed, 0):
            item = dataset[0] if hasattr(dataset, "__getitem__") else next(iter(dataset))
    except BaseException as error:  # the run opens it as it has to be, and tells
        if is_interrupt(error):
            raise
        return None
    try:
        return as_sample(item, name="the first item", use=table.use)
    except DataError:  # told once, with the first forward
        return None


def _stated(dataset: Any, table: DataTable, seed: int) -> Sample:
    try:
        with seeded(seed, 0):
            item = dataset.example()
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise DataError(f'[data] use = "{table.use}": example() failed: {describe_error(error)}') from error
    return as_sample(item, name="what example() returns", use=table.use)


def _batch(inputs: Any, table: DataTable, num_samples: int) -> Example:
    args, kwargs = call_of(inputs)
    size = max(num_samples, _LEAST_SAMPLES)
    padding = table if isinstance(inputs, Tensor) else None
    formed: Example = map_tensors(lambda tensor: _padded(tensor, padding, size), (args, kwargs))
    return formed


def _padded(sample: Tensor, table: DataTable | None, size: int) -> Tensor:
    shape = list(sample.shape)
    width = padded_width(shape[:1], table) if shape and table is not None else None
    if width is not None:
        shape[0] = width
    return torch.empty((size, *shape), dtype=sample.dtype, device="meta")
