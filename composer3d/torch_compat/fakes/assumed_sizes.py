"""Sizes that values decide, on fake tensors, which have none: rows that a mask chooses, entries that are not zero."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from composer3d.torch_compat.fakes.chosen_values import values_of

__all__ = ["ASSUMED", "assumed_share", "assumed_size_of", "were_sizes_assumed"]

# Operators with results whose size values may decide, without their overloads.
_INDEXED = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
ASSUMED = _INDEXED | {"aten::nonzero", "aten::masked_select", "aten::bincount"}
_share = 1.0
_was_assumed = False


@contextlib.contextmanager
def assumed_share(share: float) -> Iterator[None]:
    """Assume inside what share of a mask is true; elsewhere all of it.

    Args:
        share: Above 0, at most 1.
    """
    global _share
    before, _share = _share, share
    try:
        yield
    finally:
        _share = before


@contextlib.contextmanager
def were_sizes_assumed() -> Iterator[Callable[[], bool]]:
    """Return a function that says whether a size was assumed inside."""
    global _was_assumed
    before, _was_assumed = _was_assumed, False
    try:
        yield lambda: _was_assumed
    finally:
        _was_assumed = before


def assumed_size_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose result has a size that values decide; NotImplemented for any other operator.

    `nonzero`, `masked_select`, indexing by masks, and reading and writing what they choose; `bincount` of as many bins
    as asked for.

    Args:
        func: Operator.
        args: Of fake tensors; called where their mode is not on.
        kwargs: Of the operator.
    """
    import torch

    global _was_assumed
    name = func.name().split(".")[0]
    if name == "aten::nonzero":
        _was_assumed = True
        return args[0].new_empty((_number(args[0]), args[0].ndim), dtype=torch.int64)
    if name == "aten::masked_select":
        _was_assumed = True
        return args[0].new_empty(_number(args[1]))
    if name == "aten::bincount":
        minlength = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        _was_assumed = _was_assumed or not minlength
        return args[0].new_empty(max(minlength, 1), dtype=torch.int64)
    if name in _INDEXED:
        indices = args[1]
        if any(_is_mask(index) for index in indices):
            _was_assumed = True
            return func(args[0], _without_masks(indices), *args[2:], **kwargs)
    return NotImplemented


def _is_mask(index: Any) -> bool:
    return index is not None and str(index.dtype) in ("torch.bool", "torch.uint8")


def _without_masks(indices: Any) -> list[Any]:
    import torch

    found: list[Any] = []
    for index in indices:
        if _is_mask(index):
            found += [index.new_empty(_number(index), dtype=torch.int64) for _ in range(index.ndim)]
        else:
            found.append(index)
    return found


def _number(mask: Any) -> int:
    values = values_of(mask)
    if values is not None:
        return int(values.sum())
    return math.ceil(mask.numel() * _share)
