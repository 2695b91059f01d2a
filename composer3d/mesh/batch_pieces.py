"""Division of a global batch among ranks that read samples of their own: in equal parts, or by a plugin's weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from composer3d.errors import StepError
from composer3d.mesh.layout import Layout, Role

__all__ = ["BatchPieces", "SampleWeights", "equal_reader", "pieces_of"]

Stash = TypeVar("Stash")


class _Context(Protocol):
    """The part of a `RunContext` that is asked."""

    rank: int
    layout: Layout

    def stash(self, cls: type[Stash], /) -> Stash: ...


@dataclass(kw_only=True, eq=False)
class SampleWeights:
    """Stash of unequal parts of the global batch: `context.stash(SampleWeights)`, filled when plugins are configured.

    Attributes:
        by_axis: For an axis of independent models, how many samples each of them is given, in proportion.
    """

    by_axis: dict[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BatchPieces:
    """Equal pieces that a global batch is divided into, those of one rank among them.

    Args:
        first: The rank's first piece.
        num: Its pieces, one after the other.
        most: Pieces of the rank with the most.
        total: Pieces of all ranks of a world.
        evaluated: The rank's part of a batch that every model is evaluated on, as its index and the number of parts.
    """

    first: int
    num: int
    most: int
    total: int
    evaluated: tuple[int, int]

    @property
    def name(self) -> str:
        """The pieces in words."""
        return "data-parallel ranks" if self.most == 1 else "equal parts, of which ranks have different numbers"

    @property
    def slice(self) -> dict[str, Any]:
        """The rank's slice, as samplers take it."""
        return {"rank": self.first, "degree": self.total, "num": self.num}

    @property
    def read(self) -> dict[str, Any]:
        """The samples of the rank in steps and in evaluations, as a run's loader takes them."""
        return {**self.slice, "evaluated": self.evaluated}


def pieces_of(context: _Context) -> BatchPieces:
    """Return the pieces of a context's rank: one for each rank that reads samples of its own, or by weights."""
    layout, by_axis = context.layout, context.stash(SampleWeights).by_axis
    reader = layout.index(context.rank, Role.BATCH, Role.INDEPENDENT)
    evaluated = layout.index(context.rank, Role.BATCH), layout.degree(Role.BATCH)
    if not by_axis:
        return BatchPieces(
            first=reader, num=1, most=1, total=layout.degree(Role.BATCH, Role.INDEPENDENT), evaluated=evaluated
        )
    names = layout.names(Role.BATCH, Role.INDEPENDENT)
    weights = [by_axis.get(name, (1,) * layout.degrees[name]) for name in names]
    nums = [math.prod(each) for each in itertools.product(*weights)]
    return BatchPieces(first=sum(nums[:reader]), num=nums[reader], most=max(nums), total=sum(nums), evaluated=evaluated)


def equal_reader(context: _Context) -> int:
    """Return the index of a context's rank among those that read samples of their own.

    Raises:
        StepError: They read different numbers of samples.
    """
    by_axis = context.stash(SampleWeights).by_axis
    if by_axis:
        axis, weights = next(iter(by_axis.items()))
        raise StepError(
            f"ranks along {axis} are given {':'.join(map(str, weights))} of a batch, which is not in equal parts; let "
            "run.sampler(...) or run.loader(...) divide it"
        )
    return context.layout.index(context.rank, Role.BATCH, Role.INDEPENDENT)
