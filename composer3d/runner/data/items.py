"""What an item of a data set may be: a pair, a mapping, or one row of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer3d.errors import DataError
from composer3d.runner.data.source import Sample

__all__ = ["as_sample", "is_row"]


def as_sample(item: Any, *, name: str, use: str) -> Sample:
    """Return (tokens, targets) of an item: a pair, a mapping with both, or one row of tokens.

    Raises:
        DataError: The item is something else, or a row of fewer than two tokens.
    """
    if isinstance(item, Mapping):
        if not {"tokens", "targets"} <= set(item):
            keys = ", ".join(sorted(str(key) for key in item))
            raise DataError(f'[data] use = "{use}": {name} has the keys {keys}; it needs "tokens" and "targets"')
        return _tensor(item["tokens"]), _tensor(item["targets"])
    if not is_row(item):
        if isinstance(item, tuple | list) and len(item) == 2:
            return _tensor(item[0]), _tensor(item[1])
        raise DataError(
            f'[data] use = "{use}": {name} is of type {type(item).__name__}; it must be a pair (tokens, targets), a '
            'mapping with "tokens" and "targets", or one row of tokens'
        )
    row = _tensor(item)
    if len(row) < 2:
        raise DataError(
            f'[data] use = "{use}": {name} has {len(row)} token{"s" * (len(row) != 1)}; a row needs 2, the second '
            "being the target of the first"
        )
    return row[:-1], row[1:]


def is_row(item: Any) -> bool:
    """Tell whether an item is one row of tokens, each the target of the one before it."""
    if isinstance(item, Tensor | np.ndarray):
        return item.ndim == 1
    return isinstance(item, list) and all(isinstance(token, int) for token in item)


def _tensor(value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    # Embeddings and losses want int64; images and other rows of more dims stay what they are.
    is_index = tensor.dim() <= 1 and not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.to(torch.int64) if is_index else tensor
