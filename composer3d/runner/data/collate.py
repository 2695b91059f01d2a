"""Collation of samples into a batch: padding, and checks that name the sample at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from composer3d import map_tensors
from composer3d.errors import DataError
from composer3d.runner.data.data_source import IGNORED, Sample
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.inputs import Inputs, call_of, named_leaves, stacked

__all__ = ["Batch", "check_vocabulary", "collate", "padded_width"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's samples of one data-parallel rank.

    Args:
        inputs: Tokens `[b, S]`, or what a data set of one's own gives, stacked.
        targets: `[b, S]`, where -100 carries no loss, or what a data set gives, stacked.
        step: The step, or the number of an evaluation batch.
        indices: The samples in the source, in the order of the rows; -1 is a row that only fills up.
    """

    inputs: Any
    targets: Any
    step: int
    indices: tuple[int, ...]

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments of the model."""
        return call_of(self.inputs)[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the model."""
        return call_of(self.inputs)[1]

    @property
    def tokens(self) -> Tensor:
        """The model's only input, or its first one by position."""
        tokens: Tensor = self.args[0]
        return tokens

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's loader calls it too."""
        args, kwargs, targets = map_tensors(lambda tensor: tensor.pin_memory(), (self.args, self.kwargs, self.targets))
        inputs = Inputs(args=args, kwargs=kwargs) if isinstance(self.inputs, Inputs) else args[0]
        return replace(self, inputs=inputs, targets=targets)


def padded_width(lengths: Sequence[int], table: DataTable) -> int | None:
    """Return the tokens of every row of a global batch with samples of these lengths; None is no padding."""
    if table.padding == "none":
        return None
    if table.padding == "seq_len":
        return table.seq_len
    longest = max(lengths)
    if table.padding == "longest":
        return longest
    assert table.pad_multiple is not None
    return min(-(-longest // table.pad_multiple) * table.pad_multiple, max(table.seq_len, longest))


def collate(
    samples: Sequence[Sample], *, step: int, indices: Sequence[int], width: int | None, table: DataTable
) -> Batch:
    """Stack samples, padded to a width if there is one.

    Args:
        samples: (inputs, targets) of each row.
        step: Number of the batch.
        indices: Number of each sample in the source.
        width: Tokens of every row; None stacks as they are.
        table: Has the token for padding.

    Raises:
        DataError: Shapes differ and there is no padding, or a sample is longer than seq_len.
    """
    if width is not None:
        samples = [_padded(sample, index, width, table) for sample, index in zip(samples, indices, strict=True)]
    for sample, index in zip(samples, indices, strict=True):
        _refuse_other_form(samples[0], sample, indices[0], index)
    return Batch(
        inputs=stacked([inputs for inputs, _ in samples]),
        targets=stacked([targets for _, targets in samples]),
        step=step,
        indices=tuple(indices),
    )


def _refuse_other_form(first: Sample, sample: Sample, first_index: int, index: int) -> None:
    meet = f"[data] samples {first_index} and {index} meet in one batch"
    is_one, is_float = isinstance(first[0], Tensor), getattr(first[0], "is_floating_point", bool)()
    for place, name in enumerate(("inputs" if not is_one else "input" if is_float else "tokens", "targets")):
        expected, found = dict(named_leaves(first[place], name)), dict(named_leaves(sample[place], name))
        if expected.keys() != found.keys():
            only = sorted(expected.keys() ^ found.keys())
            raise DataError(f"{meet}, and only one of them has {only[0]}; give samples of one form")
        for leaf, tensor in found.items():
            if tensor.shape != expected[leaf].shape:
                raise DataError(
                    f"{meet} and their {leaf} have the shapes {tuple(expected[leaf].shape)} and {tuple(tensor.shape)}; "
                    'set padding = "longest", "multiple" or "seq_len", or give samples of one shape'
                )


def _padded(sample: Sample, index: int, width: int, table: DataTable) -> Sample:
    tokens, targets = sample
    if not isinstance(tokens, Tensor) or not isinstance(targets, Tensor):
        raise DataError(
            f'[data] padding = "{table.padding}" is for one row of tokens and one target for each; sample {index} has '
            "several inputs or targets; pad them in the data set"
        )
    if tokens.dim() != 1 or tokens.shape != targets.shape or targets.is_floating_point():
        raise DataError(
            f'[data] padding = "{table.padding}" is for one row of tokens and one target for each; sample {index} has '
            f"tokens of shape {tuple(tokens.shape)} and {targets.dtype} targets of shape {tuple(targets.shape)}"
        )
    if len(tokens) > table.seq_len:
        raise DataError(
            f"[data] sample {index} has {len(tokens)} tokens, more than seq_len = {table.seq_len}; raise seq_len, or "
            "cut the sample in the data set"
        )
    if len(tokens) > width:
        raise DataError(
            f"[data] sample {index} has {len(tokens)} tokens, more than the data set's `lengths` say; mend `lengths`"
        )
    missing = width - len(tokens)
    return (
        torch.nn.functional.pad(tokens, (0, missing), value=table.pad_id),
        torch.nn.functional.pad(targets, (0, missing), value=IGNORED),
    )


def check_vocabulary(batch: Batch, *, vocab_size: int) -> None:
    """Refuse tokens and targets that the model has no row for.

    Raises:
        DataError: Names the sample, the place and the token.
    """
    if not isinstance(batch.inputs, Tensor) or batch.inputs.dtype is not torch.int64:
        return
    wrong_tokens = (batch.tokens < 0) | (batch.tokens >= vocab_size)
    _refuse(batch, batch.tokens, wrong_tokens, "token", vocab_size)
    if not isinstance(batch.targets, Tensor):
        return
    if batch.targets.shape == batch.tokens.shape and not batch.targets.is_floating_point():
        wrong = ((batch.targets < 0) | (batch.targets >= vocab_size)) & (batch.targets != IGNORED)
        _refuse(batch, batch.targets, wrong, "target", vocab_size)


def _refuse(batch: Batch, values: Tensor, wrong: Tensor, kind: str, vocab_size: int) -> None:
    if not bool(wrong.any()):
        return
    place = wrong.nonzero()[0].tolist()
    raise DataError(
        f"[data] sample {batch.indices[place[0]]} holds the {kind} {int(values[tuple(place)])} at place "
        f"{place[-1]}, and the model's vocab_size = {vocab_size} allows 0 to {vocab_size - 1}; raise vocab_size, "
        "or mend the data" + (" (-100 marks targets without loss)" if kind == "target" else "")
    )
