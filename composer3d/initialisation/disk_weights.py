"""Weights on disk: of each a rank reads only the part that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from composer3d.torch_compat import without_torch_functions

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Slab", "TensorSource", "WeightsOnDisk"]


class TensorSource(Protocol):
    """Values of parameters and buffers by FQN, readable in slices; missing ones come from the factory's recipe."""

    def __contains__(self, fqn: str) -> bool:
        """Return whether it has a tensor; under every name of a tie, or under none."""

    def shape(self, fqn: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""

    def read(self, fqn: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Read a part.

        Args:
            fqn: Of the tensor.
            ranges: (start, stop) of every dim.
        """

    def fingerprint(self) -> int:
        """Return a 64-bit digest of names, shapes and dtypes, by which ranks compare their sources; reads no values."""


@runtime_checkable
class WeightsOnDisk(Protocol):
    """A factory whose model has its weights on disk."""

    def __call__(self) -> nn.Module:
        """Return the model."""

    def open_weights(self, model: nn.Module) -> TensorSource | None:
        """Return where the values of the model's parameters and buffers lie; None: all are made by the factory.

        Args:
            model: As the factory returned it, on meta.
        """


class Slab:
    """A slice of a tensor in a source, sliced further without being read.

    Args:
        source: Where the values are.
        fqn: Of the tensor.
        runs: Of every dim the (start, length) of what belongs to the part, in order; None is the whole tensor.
    """

    def __init__(
        self, source: TensorSource, fqn: str, runs: Sequence[tuple[tuple[int, int], ...]] | None = None
    ) -> None:
        self._source, self._fqn = source, fqn
        self._runs = [((0, size),) for size in source.shape(fqn)] if runs is None else list(runs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The part's sizes."""
        return tuple(sum(length for _, length in runs) for runs in self._runs)

    def narrow(self, dim: int, start: int, length: int) -> Slab:
        """Return a part of the part, as torch's `narrow`."""
        return self.reordered(dim, [(start, length)])

    def chunk(self, chunks: int, dim: int) -> tuple[Slab, ...]:
        """Chunk as torch does, which makes fewer chunks where the dim is short."""
        size = self.shape[dim]
        if size == 0:
            return (self,) * chunks
        step = -(-size // chunks)
        return tuple(self.narrow(dim, start, min(step, size - start)) for start in range(0, size, step))

    def reordered(self, dim: int, runs: Sequence[tuple[int, int]]) -> Slab:
        """Return the (start, length) runs of the part along a dim, one after the other."""
        mine = [piece for start, length in runs for piece in _within(self._runs[dim], start, length)]
        return Slab(self._source, self._fqn, [tuple(mine) if d == dim else kept for d, kept in enumerate(self._runs)])

    def read(self) -> Tensor:
        """Read the part, and nothing else of the tensor."""
        import torch

        several = next((dim for dim, runs in enumerate(self._runs) if len(runs) > 1), None)
        if several is None:
            ranges = [(runs[0][0], sum(runs[0])) if runs else (0, 0) for runs in self._runs]
            # A proof widens the dtypes that code names, and those of a file are what they are.
            with without_torch_functions():
                return self._source.read(self._fqn, ranges)
        parts = ([(run,) if d == several else kept for d, kept in enumerate(self._runs)] for run in self._runs[several])
        return torch.cat([Slab(self._source, self._fqn, part).read() for part in parts], several)


def _within(runs: Sequence[tuple[int, int]], start: int, length: int) -> list[tuple[int, int]]:
    """Return the runs that a range of a sequence of runs covers, neighbours joined."""
    found: list[tuple[int, int]] = []
    for first, size in runs:
        begin, end = max(start, 0), min(start + length, size)
        if begin < end:
            if found and sum(found[-1]) == first + begin:
                found[-1] = (found[-1][0], found[-1][1] + end - begin)
            else:
                found.append((first + begin, end - begin))
        start -= size
    return found
