"""Dim of a sharded tensor after a view into another shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Indivisible", "Placed", "Unplaceable", "inside", "regroup"]


class Unplaceable(Exception):
    """The sharded dim does not stay one dim in the view; the message says why."""


class Indivisible(Unplaceable):
    """The sharded dim becomes a dim that does not divide by the degree.

    Args:
        number: Its size.
    """

    def __init__(self, message: str, *, number: int) -> None:
        self.number = number
        super().__init__(message)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A sharded dim.

    Args:
        dim: Index of the tensor dim.
        parts: Sizes, in the whole tensor, of what stands one after another in it; each is sharded over all ranks, so
            that a local tensor is a shard of the first, then one of the second.
    """

    dim: int
    parts: tuple[int, ...]


def regroup(old: Sequence[int], placed: Placed, new: Sequence[int], *, degree: int) -> Placed:
    """Return the sharded dim of shape `new` after a view from shape `old`.

    Raises:
        Indivisible: It does not divide.
        Unplaceable: What is sharded is spread over several dims.

    >>> regroup([2, 5, 24], Placed(dim=2, parts=(24,)), [2, 5, 4, 6], degree=2)
    Placed(dim=2, parts=(4,))
    >>> regroup([2, 5, 24], Placed(dim=2, parts=(8, 8, 8)), [2, 5, 3, 4, 2], degree=2)
    Placed(dim=3, parts=(4,))
    >>> regroup([2, 4, 5, 6], Placed(dim=1, parts=(4,)), [8, 5, 6], degree=2)
    Placed(dim=0, parts=(4, 4))
    """
    for olds, news in _groups(old, new):
        if placed.dim in olds:
            before = math.prod(old[dim] for dim in olds if dim < placed.dim)
            after = math.prod(old[dim] for dim in olds if dim > placed.dim)
            parts = tuple(part * after for part in placed.parts) * before
            return _split(parts, [dim for dim in news if new[dim] != 1], new, degree)
    raise Unplaceable("the sharded dim is gone")


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Return the dims of both shapes in the smallest groups of equal products."""
    result = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = i, j
        left = old[i] if i < len(old) else 1
        right = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while left != right:
            if left < right and i < len(old):
                left, i = left * old[i], i + 1
            elif j < len(new):
                right, j = right * new[j], j + 1
            else:
                raise Unplaceable("the shapes hold different numbers of elements")
        while i < len(old) and old[i] == 1:
            i += 1
        while j < len(new) and new[j] == 1:
            j += 1
        result.append((range(first, i), range(second, j)))
    return result


def _split(parts: tuple[int, ...], dims: Sequence[int], new: Sequence[int], degree: int) -> Placed:
    if len(dims) == 1:
        return Placed(dim=dims[0], parts=parts)
    if len(set(parts)) != 1:
        raise Unplaceable(f"parts of {list(parts)} are not one dim of {list(new)}")
    # Equal parts stand in the leading dims; the one after those is sharded.
    left = len(parts)
    for index, dim in enumerate(dims):
        last = index == len(dims) - 1
        if left == 1 or last:
            inner = tuple(parts[:1]) if last else (new[dim],)
            result = Placed(dim=dim, parts=(new[dim],) if left == 1 else inner * left)
            if any(part % degree for part in result.parts):
                raise Indivisible(f"{new[dim]} (of {list(new)}) does not divide by tp = {degree}", number=new[dim])
            return result
        if left % new[dim]:
            raise Unplaceable(f"{left} equal parts are not leading dims of {list(new)}")
        left //= new[dim]
    raise Unplaceable("the sharded dim is gone")


def inside(
    placed: Placed, start: int, stop: int, local: Callable[[int], int]
) -> tuple[int, int, tuple[int, ...]] | None:
    """Return the local range of `start:stop` of the sharded dim, and its parts; None where it splits a part.

    Args:
        placed: The sharded dim.
        start: Of the range, in the whole.
        stop: Likewise.
        local: Returns the size of this rank's shard of a part.

    >>> inside(Placed(dim=0, parts=(8, 4, 4)), 8, 12, lambda size: size // 2)
    (4, 6, (4,))
    """
    edges = [sum(placed.parts[:index]) for index in range(len(placed.parts) + 1)]
    if start not in edges or stop not in edges:
        return None
    parts = placed.parts[edges.index(start) : edges.index(stop)]
    first = sum(map(local, placed.parts[: edges.index(start)]))
    return first, first + sum(map(local, parts)), parts
