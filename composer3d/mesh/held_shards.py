"""Shards of what is drawn: whole tensors are drawn on every rank that holds a part of them, which keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["DimShard", "Held", "Padding", "PositionShard", "Shard", "Shards"]

Shape = tuple[int, ...]


class Shard(Protocol):
    """A rank's shard of a tensor."""

    @property
    def is_of_sequence(self) -> bool:
        """Whether other ranks hold other positions of the same sequence, or what they exchanged for them."""

    def dims(self, shape: Shape) -> tuple[int, ...]:
        """Return the dims of a shard of a shape that are shorter or longer than those of the whole tensor."""

    def applies(self, shape: Shape) -> bool:
        """Return whether tensors of a shape are shards of this kind."""

    def fits(self, shape: Shape) -> bool:
        """Return whether they are, or have one number for the whole dim."""

    def whole(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor; that of what is no shard as it is."""

    def local(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Return this rank's shard, of a shape, of a whole tensor."""


@dataclass(frozen=True, kw_only=True)
class DimShard:
    """The shard of a tensor that one of several ranks holds.

    Args:
        dim: The dim that is sharded.
        parts: Sizes in the whole tensor of what stands one after another in it; each is sharded over all ranks.
        index: Of the rank.
        degree: Number of ranks.
        is_of_sequence: Whether the ranks are those of a sequence, which exchanged positions for it, as heads.
    """

    dim: int
    parts: tuple[int, ...]
    index: int
    degree: int
    is_of_sequence: bool = False

    def dims(self, shape: Shape) -> tuple[int, ...]:
        """Return the dims of a shard that differ from those of the whole tensor."""
        return (self.dim,)

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

    def local(self, tensor: Tensor, shape: Shape) -> Tensor:
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
    def is_of_sequence(self) -> bool:
        """Whether other ranks hold other positions: True."""
        return True

    def dims(self, shape: Shape) -> tuple[int, ...]:
        """Return the dims of a shard that differ from those of the whole tensor."""
        return (self.dim,)

    @property
    def size(self) -> int:
        """Positions of this rank."""
        return sum(len(self.index(part)) for part in self.parts)

    def applies(self, shape: Shape) -> bool:
        """Return whether tensors of a shape are shards of this kind."""
        return len(shape) == self.ndim and shape[self.dim] == self.size

    def fits(self, shape: Shape) -> bool:
        """Return whether tensors of a shape are shards of this kind, or have one number for all positions."""
        return len(shape) == self.ndim and shape[self.dim] in (1, self.size)

    def whole(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor; that of what has no positions as it is."""
        if not self.applies(shape):
            return shape
        return (*shape[: self.dim], sum(map(self.tokens, self.parts)), *shape[self.dim + 1 :])

    def local(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Return this rank's positions of a whole tensor."""
        import torch

        lengths = [self.tokens(part) for part in self.parts]
        pieces = [
            piece.index_select(self.dim, self.index(part).to(piece.device).clamp(max=length - 1))
            for piece, part, length in zip(tensor.split(lengths, self.dim), self.parts, lengths, strict=True)
        ]
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True, kw_only=True, eq=False)
class Padding:
    """Dims of a tensor that are as long as a padded sequence; padding that ranks add is no part of the whole.

    Args:
        lengths: Of sequences without padding, by their padded length.
        is_position: Returns of (number of dims, dim, size) whether such a dim is of positions; None if that is unknown.
    """

    lengths: Mapping[int, int]
    is_position: Callable[[int, int, int], bool | None]
    is_of_sequence: bool = False

    def dims(self, shape: Shape) -> tuple[int, ...]:
        """Return the padded dims."""
        return tuple(dim for dim, is_position in self._asked(shape) if is_position)

    def _asked(self, shape: Shape) -> list[tuple[int, bool | None]]:
        padded = [(dim, size) for dim, size in enumerate(shape) if size in self.lengths]
        return [(dim, self.is_position(len(shape), dim, size)) for dim, size in padded]

    def touches(self, shape: Shape) -> bool:
        """Return whether a tensor of a shape may have padding."""
        return any(is_position is not False for _, is_position in self._asked(shape))

    def applies(self, shape: Shape) -> bool:
        """Return whether a tensor of a shape has padding."""
        return bool(self.dims(shape))

    def fits(self, shape: Shape) -> bool:
        """Return whether it is known of every dim."""
        return not any(is_position is None for _, is_position in self._asked(shape))

    def whole(self, shape: Shape) -> Shape:
        """Return the shape without padding."""
        dims = self.dims(shape)
        return tuple(self.lengths[size] if dim in dims else size for dim, size in enumerate(shape))

    def local(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Return a tensor with padding, which means nothing."""
        import torch

        for dim in self.dims(shape):
            index = torch.arange(shape[dim], device=tensor.device).clamp(max=self.lengths[shape[dim]] - 1)
            tensor = tensor.index_select(dim, index)
        return tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """Part of what is drawn that a rank of a sequence's axis has.

    Args:
        shard: Its positions, or heads; None where all ranks have all of it.
        padding: Of other dims.
    """

    shard: DimShard | PositionShard | None = None
    padding: Padding | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Shards:
    """Shards of shards.

    Args:
        inner_first: Each is a shard of what the next one holds.
    """

    inner_first: tuple[Shard, ...]

    @classmethod
    def of(cls, inner: DimShard | None, held: Held | None) -> Shards | None:
        """Return those that there are; None where there are none.

        Of one sequence that both shard, the outer knows the length of what the inner left, and the inner that of all.
        Of heads that both shard, those that were exchanged for positions are a part of the others.
        """
        outer, padding = (held.shard, held.padding) if held is not None else (None, None)
        order: tuple[Shard | None, ...] = (inner, outer, padding)
        if isinstance(outer, DimShard):
            order = (outer, inner, padding)
        elif inner is not None and outer is not None and inner.dim == outer.dim and len(inner.parts) == 1:
            outer = replace(outer, parts=tuple(part * inner.degree for part in outer.parts))
            order = (replace(inner, parts=(outer.size,)), outer, padding)
        found = tuple(shard for shard in order if shard is not None)
        return cls(inner_first=found) if found else None

    @property
    def is_of_sequence(self) -> bool:
        """Whether other ranks hold other positions of the same sequence, or what they exchanged for them."""
        return any(shard.is_of_sequence for shard in self.inner_first)

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
        for shard, inner in reversed(self._applied(shape)):
            tensor = shard.local(tensor, inner)
        return tensor

    def places(self, shape: Shape, device: torch.device) -> list[Tensor]:
        """Return of each dim of a shard of a shape where it lies in the whole tensor, int64 [size of the dim]."""
        import torch

        applied, whole, found = self._applied(shape), self.whole(shape), []
        for dim, size in enumerate(whole):
            place = torch.arange(size, device=device).view([-1 if at == dim else 1 for at in range(len(whole))])
            for shard, inner in reversed(applied):
                if dim in shard.dims(inner):
                    place = shard.local(place, tuple(n if at == dim else 1 for at, n in enumerate(inner)))
            found.append(place.flatten())
        return found

    def _applied(self, shape: Shape) -> list[tuple[Shard, Shape]]:
        """Return the shards that a tensor of a shape is, each with the shape that it has."""
        applied: list[tuple[Shard, Shape]] = []
        for shard in self.inner_first:
            if shard.applies(shape):
                applied.append((shard, shape))
                shape = shard.whole(shape)
        return applied
