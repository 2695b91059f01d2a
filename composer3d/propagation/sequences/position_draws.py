"""Random numbers of a sharded sequence: each rank draws those of its positions, as one device draws them for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from composer3d.context import RunContext
from composer3d.propagation.shards import ShardSpec

__all__ = ["PositionDraws", "SequenceDraws"]


class SequenceDraws(Protocol):
    """Random numbers of a sharded sequence, as those of its positions or of a rank."""

    def at(self, spec: ShardSpec) -> contextlib.AbstractContextManager[None]:
        """Return where a function of a tensor with this metadata draws."""

    def by_rank(self, function: str) -> None:
        """Take note of a function that draws on every rank by itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionDraws:
    """Draws of the positions that this rank holds.

    Memory: of what is drawn the whole sequence's, where it is drawn. Collectives: none.

    Args:
        context: Of the run.
        index: Returns this rank's positions of a sequence of a global length, int64.
        tokens: Returns how many of a length are no padding.
    """

    context: RunContext
    index: Callable[[int, torch.device], Tensor]
    tokens: Callable[[int], int] = int

    def at(self, spec: ShardSpec) -> contextlib.AbstractContextManager[None]:
        """Return where a function of a tensor with this metadata draws."""
        streams = self.context.streams
        if streams.policy == "ranks":
            return contextlib.nullcontext()
        return streams.at_positions(
            dim=spec.placed.dim,
            ndim=spec.shadow.ndim,
            parts=spec.placed.parts,
            index=lambda length: self.index(length, self.context.device),
            tokens=self.tokens,
        )

    def by_rank(self, function: str) -> None:
        """Let `verify` know of a function that draws on every rank by itself."""
        self.context.streams.note_by_rank(function)
