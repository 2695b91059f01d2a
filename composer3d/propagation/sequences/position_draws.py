"""Random numbers of a sharded sequence: each rank draws those of its positions, as one device draws them for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.context import RunContext
from composer3d.mesh.held_shards import DimShard, Held, Padding, PositionShard
from composer3d.propagation.shards import ShardSpec

__all__ = ["PositionDraws", "SequenceDraws"]


class SequenceDraws(Protocol):
    """Random numbers of a sharded sequence, as one device draws them."""

    def at(self, spec: ShardSpec) -> contextlib.AbstractContextManager[None]:
        """Return where a function of a tensor with this metadata draws."""

    def everywhere(self) -> contextlib.AbstractContextManager[None]:
        """Return where a function draws for tensors that all ranks have whole."""

    def is_seeded(self) -> bool:
        """Return whether the model's code has seeded torch's generators by itself."""

    def of_queries(self, spec: ShardSpec) -> contextlib.AbstractContextManager[None]:
        """Return where attention drops weights of this rank's queries, which have this metadata, as [B, H, S, E]."""

    def of_heads(self, *, index: int, degree: int, size: int) -> contextlib.AbstractContextManager[None]:
        """Return where it drops weights of all queries, and of a rank's part of so many heads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionDraws:
    """Draws of the positions that this rank holds.

    Memory: of what is drawn the whole sequence's, where it is drawn; of weights that attention drops inside this rank's
        alone. Collectives: none.

    Args:
        context: Of the run.
        index: Returns this rank's positions of a sequence of a global length, int64.
        tokens: Returns how many of a length are no padding.
        padded: Returns lengths without padding, by padded lengths, of the batch at work.
        is_position: Returns of (number of dims, dim, size) of what is drawn whether such a dim is one of positions;
            None if that is unknown.
    """

    context: RunContext
    index: Callable[[int, torch.device], Tensor]
    tokens: Callable[[int], int] = int
    padded: Callable[[], Mapping[int, int]] = dict
    is_position: Callable[[int, int, int], bool | None] = lambda ndim, dim, size: None

    def at(self, spec: ShardSpec) -> contextlib.AbstractContextManager[None]:
        """Return where a function of a tensor with this metadata draws."""
        shard = self._positions(spec, spec.placed.dim, spec.shadow.ndim)
        return self.context.streams.holding(Held(shard=shard, padding=self._padding()))

    def everywhere(self) -> contextlib.AbstractContextManager[None]:
        """Return where a function draws for tensors that all ranks have whole.

        Raises:
            CaptureError: A graph is being captured, which would draw on every rank by itself.
        """
        if torch_compat.capture_is_on():
            raise torch_compat.CaptureError("it draws random numbers for tensors that every rank has whole")
        return self.context.streams.holding(Held(padding=self._padding()))

    def is_seeded(self) -> bool:
        """Return whether the model's code has seeded torch's generators by itself."""
        return self.context.streams.are_seeded

    def of_queries(self, spec: ShardSpec) -> contextlib.AbstractContextManager[None]:
        """Return where attention drops weights of this rank's queries, which have this metadata, as [B, H, S, E]."""
        return self.context.streams.holding(Held(shard=self._positions(spec, 2, 4)))

    def of_heads(self, *, index: int, degree: int, size: int) -> contextlib.AbstractContextManager[None]:
        """Return where it drops weights of all queries, and of a rank's part of so many heads."""
        shard = DimShard(dim=1, parts=(size,), index=index, degree=degree, is_of_sequence=True)
        return self.context.streams.holding(Held(shard=shard))

    def _positions(self, spec: ShardSpec, dim: int, ndim: int) -> PositionShard:
        return PositionShard(
            dim=dim,
            ndim=ndim,
            parts=spec.placed.parts,
            index=lambda length: self.index(length, self.context.device),
            tokens=self.tokens,
        )

    def _padding(self) -> Padding | None:
        lengths = self.padded()
        return Padding(lengths=lengths, is_position=self.is_position) if lengths else None
