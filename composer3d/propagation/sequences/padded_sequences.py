"""Whole sequences with padding, and without.

Shapes: a tensor has all positions of the sequences that follow each other in one dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from composer3d.propagation.shards import ShardSpec

__all__ = ["tokens_of", "with_padding"]


def tokens_of(whole: Tensor, spec: ShardSpec, padded: Mapping[int, int]) -> Tensor:
    """Return the positions of a padded sequence that are tokens."""
    dim, pieces = spec.placed.dim, whole.split(list(spec.placed.parts), spec.placed.dim)
    return torch.cat([piece.narrow(dim, 0, padded.get(n := piece.shape[dim], n)) for piece in pieces], dim)


def with_padding(tokens: Tensor, spec: ShardSpec, padded: Mapping[int, int]) -> Tensor:
    """Return all positions of a padded sequence, with zeros for its padding."""
    dim, kept = spec.placed.dim, [padded.get(length, length) for length in spec.placed.parts]
    pieces = []
    for piece, length in zip(tokens.split(kept, dim), spec.placed.parts, strict=True):
        shape = [*piece.shape[:dim], length - piece.shape[dim], *piece.shape[dim + 1 :]]
        pieces += [piece, piece.new_zeros(shape)]
    return torch.cat(pieces, dim)
