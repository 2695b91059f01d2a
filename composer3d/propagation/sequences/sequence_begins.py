"""Blocks at which a sequence begins inside of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Begins"]


@dataclass(frozen=True, kw_only=True)
class Begins:
    """Blocks at which a sequence may begin.

    Args:
        blocks: FQNs.
        dim: Of their activations, the sequence.
        is_sequence: Returns whether an activation that is whole is to be sharded.
    """

    blocks: Collection[str]
    dim: int
    is_sequence: Callable[[Tensor], bool]
