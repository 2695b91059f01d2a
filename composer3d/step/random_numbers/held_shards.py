"""Shards of what is drawn: whole tensors are drawn on every rank that holds a part of them, which keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DimShard", "PositionShard", "Shard", "Shards"]

Shape = tuple[int, ...]


class Shard(Protocol):
    """A rank's shard of a tensor."""

    def applies(self, shape: Shape) -> bool:
        """Return whether tensors of a shape are shards of this kind."""

    def fits(self, shape: Shape) -> bool:
        """Return whether they are, or have one number for the whole dim."""

    def whole(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor; that of what is no shard as it is."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor."""


@dataclass(frozen=True, kw_only=True)
class DimShard:
    """The shard of a tensor that one of several ranks holds.

    Args:
        dim: The dim that is sharded.
        parts: Sizes in the whole tensor of what stands one after another in it; each is sharded over all ranks.
        index: Of the rank.
        degree: Number of ranks.
    """

    dim: int
    parts: tuple[int, ...]
    index: int
    degree: int

    def applies(self, shape: Shape) -> bool:
        """Return whether tensors of a shape are shards of this kind."""
        return self.dim < len(shape) and self.degree > 1 and shape[self.dim] * self.degree == sum(self.parts)

    def fits(self, shape: Shape) -> bool:
        """Return whether tensors of a shape are shards of this kind, or have one number for the whole dim."""
        return self.dim >= len(shape) or shape[self.dim] == 1 or shape[self.dim] * self.degree == sum(self.parts)

    def whole(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor; that of what has no such dim as it is."""
        if not self.applies(shape):
            return shape
        return (*shape[: self.dim], sum(self.parts), *shape[self.dim + 1 :])

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor."""
        import torch

        pieces = tensor.split(self.parts, self.dim)
        sizes = (part // self.degree for part in self.parts)
        return torch.cat(
            [piece.narrow(self.dim, self.index * size, size) for piece, size in zip(pieces, sizes, strict=True)],
            self.dim,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionShard:
    """The positions of sequences that one of several ranks holds; padding that ranks add is no part of the whole.

    Args:
        dim: Of the sequences, one after another.
        ndim: Of tensors that have it.
        parts: Length of each sequence, with padding.
        index: Returns this rank's positions of a sequence of such a length, int64.
        tokens: Returns its length without padding: what stands at positions from there on means nothing.
    """

    dim: int
    ndim: int
    parts: tuple[int, ...]
    index: Callable[[int], Tensor]
    tokens: Callable[[int], int] = int

    @property
    def size(self) -> int:
        """Positions of this rank."""
        return sum(len(self.index(part)) for part in self.parts)

    def applies(self, shape: Shape) -> bool:
        """Return whether tensors of a shape are shards of this kind."""
        return len(shape) == self.ndim and shape[self.dim] == self.size

    def fits(self, shape: Shape) -> bool:
        """Return whether tensors of a shape are shards of this kind, or have one number for all positions.

        One with another dim of a padded length is no shard of a tensor without padding.
        """
        if len(shape) != self.ndim or shape[self.dim] not in (1, self.size):
            return False
        padded = {part for part in self.parts if self.tokens(part) != part}
        return not any(size in padded for dim, size in enumerate(shape) if dim != self.dim)

    def whole(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor; that of what has no positions as it is."""
        if not self.applies(shape):
            return shape
        return (*shape[: self.dim], sum(map(self.tokens, self.parts)), *shape[self.dim + 1 :])

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's positions of a whole tensor."""
        import torch

        lengths = [self.tokens(part) for part in self.parts]
        pieces = [
            piece.index_select(self.dim, self.index(part).to(piece.device).clamp(max=length - 1))
            for piece, part, length in zip(tensor.split(lengths, self.dim), self.parts, lengths, strict=True)
        ]
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shards:
    """Shards of shards.

    Args:
        inner_first: Each is a shard of what the next one holds.
    """

    inner_first: tuple[Shard, ...]

    @classmethod
    def of(cls, inner: DimShard | None, outer: PositionShard | None) -> Shards | None:
        """Return those that there are; None where there are none.

        Of one sequence that both shard, the outer knows the length of what the inner left, and the inner that of all.
        """
        if inner is not None and outer is not None and inner.dim == outer.dim and len(inner.parts) == 1:
            outer = replace(outer, parts=tuple(part * inner.degree for part in outer.parts))
            inner = replace(inner, parts=(outer.size,))
        found = tuple(shard for shard in (inner, outer) if shard is not None)
        return cls(inner_first=found) if found else None

    @property
    def has_positions(self) -> bool:
        """Whether positions of a sequence are among them."""
        return any(isinstance(shard, PositionShard) for shard in self.inner_first)

    def applies(self, shape: Shape) -> bool:
        """Return whether tensors of a shape are shards of any of these kinds."""
        return self.whole(shape) != shape or any(shard.applies(shape) for shard in self.inner_first)

    def fits(self, shape: Shape) -> bool:
        """Return whether they are shards of all kinds, or have one number for a whole dim."""
        for shard in self.inner_first:
            if not shard.fits(shape):
                return False
            shape = shard.whole(shape)
        return True

    def whole(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor."""
        for shard in self.inner_first:
            shape = shard.whole(shape)
        return shape

    def local_of(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Return this rank's shard of a whole tensor.

        Args:
            tensor: The whole one.
            shape: Of the shard.
        """
        applied = []
        for shard in self.inner_first:
            if shard.applies(shape):
                applied.append(shard)
                shape = shard.whole(shape)
        for shard in reversed(applied):
            tensor = shard.local(tensor)
        return tensor
