"""Items of a data set: a row of tokens, inputs with their targets, or a mapping of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer3d.errors import DataError
from composer3d.runner.data.data_source import Sample
from composer3d.runner.data.inputs import Inputs

__all__ = ["as_sample", "is_row"]

_TARGETS = ("targets", "target", "labels", "label")
_FORMS = (
    "one row of tokens; (input, target), or (input, ..., target) of a model with several; or a mapping whose key "
    '"targets" (or "target", "labels", "label") is the target, and whose other keys name arguments of the model\'s '
    'forward, "tokens" the first one'
)


def as_sample(item: Any, *, name: str, use: str) -> Sample:
    """Return (inputs, targets) of an item.

    A tuple of tensors in the place of one tensor is several, a list of numbers is a tensor. The inputs of a pair may be
    a tuple, which is passed to the model by position, or a mapping, passed by name.

    Raises:
        DataError: The item is something else, or a row of fewer than two tokens.
    """
    try:
        if isinstance(item, Mapping):
            return _from_mapping(item)
        if is_row(item):
            return _from_row(item)
        if isinstance(item, tuple | list) and len(item) >= 2:
            *inputs, targets = item
            return _inputs(tuple(inputs) if len(inputs) > 1 else inputs[0]), _tree(targets, "the target")
    except _Wrong as error:
        raise DataError(f'[data] use = "{use}": {name} {error}') from None
    raise DataError(f'[data] use = "{use}": {name} is of type {type(item).__name__}; it must be {_FORMS}')


def is_row(item: Any) -> bool:
    """Return whether an item is one row of tokens, each the target of the one before it."""
    if isinstance(item, Tensor | np.ndarray):
        return item.ndim == 1
    return isinstance(item, list) and all(isinstance(token, int) for token in item)


class _Wrong(Exception):
    """Fault of an item, without its name."""


def _from_row(item: Any) -> Sample:
    row = _tensor(item, "the row")
    if len(row) < 2:
        raise _Wrong(
            f"has {len(row)} token{'s' * (len(row) != 1)}; a row needs 2, the second being the target of the first"
        )
    return row[:-1], row[1:]


def _from_mapping(item: Mapping[Any, Any]) -> Sample:
    targets = [key for key in _TARGETS if key in item]
    shown = ", ".join(sorted(str(key) for key in item))
    if len(targets) > 1:
        raise _Wrong(f"has the keys {shown}; only one of {', '.join(targets)} can be its target")
    if "labels" in targets and "input_ids" in item:
        # A model of transformers shifts labels by one itself; without a shift, the model would learn to copy.
        raise _Wrong(
            'has "input_ids" and "labels", which transformers shifts by one and this does not; give "tokens" and '
            '"targets", the token that follows each one, or one row of tokens'
        )
    inputs = {str(key): value for key, value in item.items() if key not in targets}
    if not inputs:
        raise _Wrong(f"has the keys {shown}, and none of them is an input of the model")
    found = _tree(item[targets[0]], f'"{targets[0]}"') if targets else None
    first = (_tree(inputs.pop("tokens"), '"tokens"'),) if "tokens" in inputs else ()
    if first and not inputs:
        return first[0], found
    return Inputs(args=first, kwargs={key: _tree(value, f'"{key}"') for key, value in inputs.items()}), found


def _inputs(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Inputs(kwargs={str(key): _tree(item, f'"{key}"') for key, item in value.items()})
    found = _tree(value, "the input")
    return Inputs(args=found) if isinstance(found, tuple) else found


def _tree(value: Any, name: str) -> Any:
    """Return a value with tensors for its leaves: tuples of tensors and mappings stay, None says nothing."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _tree(item, f'{name}["{key}"]') for key, item in value.items()}
    if isinstance(value, tuple) and any(
        isinstance(item, Tensor | np.ndarray | Mapping | tuple | list) for item in value
    ):
        return tuple(_tree(item, f"{name}[{place}]") for place, item in enumerate(value))
    return _tensor(value, name)


def _tensor(value: Any, name: str) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise _Wrong(
            f"has a value of type {type(value).__name__} as {name}, which is no tensor and no number; convert it in "
            "the data set"
        ) from None
    # Embeddings and losses require int64; images and other rows of more dims keep their dtype.
    is_index = tensor.dim() <= 1 and not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.to(torch.int64) if is_index and tensor.dtype is not torch.bool else tensor
