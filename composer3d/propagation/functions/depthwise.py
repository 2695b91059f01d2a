"""Depthwise convolutions: each rank convolves its own channels, with its shard of the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CONVOLUTIONS", "arguments_of", "keeps_apart"]

CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def arguments_of(args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a convolution by their names."""
    return {**dict(zip(_NAMES, args, strict=False)), **options}


def keeps_apart(arguments: Mapping[str, Any], *, channels: int, dim: int) -> bool:
    """Return whether a convolution makes one channel of each.

    Args:
        arguments: By their names.
        channels: Of all ranks.
        dim: The sharded one.
    """
    is_batched = arguments["input"].ndim == arguments["weight"].ndim
    groups = arguments.get("groups", 1)
    return dim == (1 if is_batched else 0) and groups == channels == arguments["weight"].shape[0]
