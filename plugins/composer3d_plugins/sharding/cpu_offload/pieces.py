"""Pieces of the parameter groups: parameters that are stepped at once."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import nn

__all__ = ["split_groups"]


def split_groups(
    groups: list[dict[str, Any]], kept: Set[nn.Parameter], piece_bytes: int
) -> Iterator[list[dict[str, Any]]]:
    """Divide groups into pieces; parameters whose state stays on the device are the first piece, all at once."""
    others = [{**group, "params": [p for p in group["params"] if p not in kept]} for group in groups]
    if any(group["params"] for group in others):
        yield [group for group in others if group["params"]]
    piece: list[dict[str, Any]] = []
    size_bytes = 0
    for group in groups:
        for parameter in group["params"]:
            if parameter not in kept or parameter.grad is None:
                continue
            own_bytes = _bytes(parameter)
            if piece and size_bytes + own_bytes > piece_bytes:
                yield piece
                piece, size_bytes = [], 0
            if piece and piece[-1]["of"] is group:
                piece[-1]["params"].append(parameter)
            else:
                piece.append({**group, "params": [parameter], "of": group})
            size_bytes += own_bytes
    if piece:
        yield piece


def _bytes(parameter: Any) -> int:
    local = torch_compat.local_of(parameter)
    return local.numel() * local.element_size()
