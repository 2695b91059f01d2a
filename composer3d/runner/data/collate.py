"""From samples to a batch: padding, and the checks that name the sample at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from composer3d.errors import DataError
from composer3d.runner.data.source import IGNORED, Sample
from composer3d.runner.data.table import DataTable

__all__ = ["Batch", "check_vocabulary", "collate", "padded_width"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's samples of one data-parallel rank.

    Args:
        tokens: `[b, S]`, or what a data set of one's own gives, stacked.
        targets: `[b, S]`; -100 carries no loss.
        step: The step, or the number of an evaluation batch.
        indices: The samples in the source, in the order of the rows; -1 is a row that only fills up.
    """

    tokens: Tensor
    targets: Tensor
    step: int
    indices: tuple[int, ...]

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's loader calls it too."""
        return replace(self, tokens=self.tokens.pin_memory(), targets=self.targets.pin_memory())


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
        samples: (tokens, targets) of each row.
        step: Number of the batch.
        indices: Number of each sample in the source.
        width: Tokens of every row; None stacks as they are.
        table: Says with which token to fill up.

    Raises:
        DataError: Shapes differ and there is no padding, or a sample is longer than seq_len.
    """
    if width is not None:
        samples = [_padded(sample, index, width, table) for sample, index in zip(samples, indices, strict=True)]
    for place, name in enumerate(("tokens", "targets")):
        for sample, index in zip(samples, indices, strict=True):
            if sample[place].shape != samples[0][place].shape:
                raise DataError(
                    f"[data] samples {indices[0]} and {index} meet in one batch and their {name} have the shapes "
                    f"{tuple(samples[0][place].shape)} and {tuple(sample[place].shape)}; set padding = "
                    '"longest", "multiple" or "seq_len", or give samples of one shape'
                )
    return Batch(
        tokens=torch.stack([tokens for tokens, _ in samples]),
        targets=torch.stack([targets for _, targets in samples]),
        step=step,
        indices=tuple(indices),
    )


def _padded(sample: Sample, index: int, width: int, table: DataTable) -> Sample:
    tokens, targets = sample
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
    if batch.tokens.is_floating_point():
        return
    wrong_tokens = (batch.tokens < 0) | (batch.tokens >= vocab_size)
    _refuse(batch, batch.tokens, wrong_tokens, "token", vocab_size)
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
