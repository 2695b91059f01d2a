"""Sharding metadata attached to local tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.errors import TransformError
from composer3d.observation.call_sites import beside
from composer3d.propagation.functions.view_shapes import Placed
from composer3d.torch_compat.compilers.captured_graphs import outside_capture

__all__ = [
    "AXES",
    "KeptShardError",
    "PREFIX",
    "SEQUENCE",
    "TENSOR_AXIS",
    "ShardSpec",
    "Marks",
    "Ranges",
    "PropagationError",
    "attach",
    "common_parts",
    "copy_mark",
    "spec_of",
    "specs_in",
    "exchanged",
    "interned",
    "is_dense",
    "mark",
    "ranges_of",
    "restated",
    "run_of",
    "shadow_of",
    "sources_of",
    "strip",
    "unmark",
]

# Of the attribute of a tensor that has its mark, before the axis.
PREFIX = "composer3d_shard_"
# The mesh axis of marks that name none.
TENSOR_AXIS = "tp"
# Axes over which activations are sharded, outermost first: what an inner one shards is a local shard of the outer one.
AXES = ("cp", TENSOR_AXIS)
Ranges = frozenset[tuple[int, int]]
# Source of a mark along the sequence.
SEQUENCE = "the sequence"


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardSpec:
    """Sharding of a local tensor; tensors that share one object are sharded alike.

    Args:
        shadow: A tensor on meta of the global shape.
        placed: The sharded dim and its parts.
        sources: FQNs of the projections that it was computed from.
        start: First feature, in the result of the one projection it comes from, of the sharded dim; `scale` is the
            number of features that one index spans.
        scale: See `start`.
        whole: Ranges of features of that result that are all-gathered where code takes them.
        is_weight: Whether it was computed from sharded parameters alone.
        axis: The mesh axis over whose ranks it is sharded; a tensor has one mark for each that shards it.
        degree: Ranks along it.
    """

    shadow: Tensor
    placed: Placed
    sources: frozenset[str]
    start: int = 0
    scale: int = 1
    whole: Ranges = frozenset()
    is_weight: bool = False
    axis: str = TENSOR_AXIS
    degree: int = 1

    @property
    def is_sequence(self) -> bool:
        """Whether the sharded dim is the sequence."""
        return self.sources == {SEQUENCE}

    def features(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of features, in the one projection's result, of a range of the sharded dim."""
        return self.start + start * self.scale, self.start + stop * self.scale

    def is_gathered(self, start: int, stop: int) -> bool:
        """Return whether a range of the sharded dim is gathered where code takes it."""
        first, last = self.features(start, stop)
        return any(one <= first and last <= other for one, other in self.whole)


# Metadata of equal shards, as long as a tensor or a decision has it.
_known: weakref.WeakValueDictionary[Any, ShardSpec] = weakref.WeakValueDictionary()


def shadow_of(shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on meta, of the default dtype unless another is given, that is no part of a captured graph."""
    if not torch_compat.capture_is_on():
        return torch.empty(shape, dtype=dtype, device="meta")
    with outside_capture():
        return torch.empty(shape, dtype=dtype, device="meta")


def interned(spec: ShardSpec) -> ShardSpec:
    """Return the one object for all shards with this metadata, so that decisions about a step hold for the next one.

    Shadows of a mode, such as fake ones, belong to it alone.
    """
    shadow = spec.shadow
    if type(shadow) is not Tensor:
        return spec
    key = (
        shadow.shape, shadow.stride(), shadow.dtype, shadow.is_inference(), spec.placed, spec.sources, spec.start,
        spec.scale, spec.whole, spec.is_weight, spec.axis, spec.degree,
    )  # fmt: skip
    return _known.setdefault(key, spec)


class PropagationError(TransformError):
    """A function mixes features that different ranks hold.

    Args:
        sources: FQNs of the projections whose results it mixes.
        ranges: (FQN, start, stop) of the features that it mixes.
        edge: (start, stop) in a projection's features where the code takes its result apart.
        number: A size, such as of heads, that does not divide by the degree; else None.
        summed: Size of the sharded dim over which it sums with a tensor that is whole; else None.

    Attributes:
        step: Of a run: how many functions were right before.
    """

    def __init__(
        self,
        message: str,
        *,
        sources: frozenset[str] = frozenset(),
        edge: tuple[int, int] | None = None,
        number: int | None = None,
        ranges: Sequence[tuple[str, int, int]] = (),
        summed: int | None = None,
    ) -> None:
        self.summed, self.step = summed, 0
        self.sources, self.edge, self.number, self.ranges = sources, edge, number, ranges
        super().__init__(message)

    @classmethod
    def of_code(cls, error: Exception) -> PropagationError:
        """Return the error of a model's own code that raised one, with its line."""
        text = str(error).partition("\n")[0]
        return cls(f"its code cannot be run by itself ({type(error).__name__}: {text}){beside(error)}")

    @property
    def divides(self) -> bool:
        """Whether the reason differs from a size that does not divide."""
        return self.number is None


class KeptShardError(PropagationError):
    """A module keeps a sharded tensor that code outside of it uses as a full one."""


def specs_in(*values: Any, axis: str = TENSOR_AXIS) -> list[ShardSpec]:
    """Return the metadata of sharded tensors among arguments, in order, also inside lists, tuples and dicts.

    Without torch's trees of anything, since it runs before every function that is propagated.
    """
    found: list[ShardSpec] = []
    for value in values:
        if isinstance(value, Tensor):
            spec = getattr(value, PREFIX + axis, None)
            if spec is not None:
                found.append(spec)
        elif isinstance(value, list | tuple):
            found += specs_in(*value, axis=axis)
        elif isinstance(value, dict):
            found += specs_in(*value.values(), axis=axis)
    return found


def spec_of(tensor: Any, axis: str = TENSOR_AXIS) -> ShardSpec | None:
    """Return a tensor's sharding metadata over one axis; None if it is replicated there."""
    return getattr(tensor, PREFIX + axis, None) if isinstance(tensor, Tensor) else None


def attach(tensor: Tensor, spec: ShardSpec) -> Tensor:
    """Mark a tensor, and return it."""
    setattr(tensor, PREFIX + spec.axis, spec)
    return tensor


def mark(
    tensor: Tensor,
    *,
    placed: Placed,
    degree: int,
    sources: frozenset[str] = frozenset(),
    whole: Ranges = frozenset(),
    is_weight: bool = False,
    axis: str = TENSOR_AXIS,
) -> Tensor:
    """Mark a tensor as a local shard along one dim, whose global size is that of its parts, and return it."""
    shape = list(tensor.shape)
    shape[placed.dim] = sum(placed.parts)
    shadow = shadow_of(shape, tensor.dtype)
    spec = ShardSpec(
        shadow=shadow, placed=placed, sources=sources, whole=whole, is_weight=is_weight, axis=axis, degree=degree
    )
    return attach(tensor, interned(spec))


class Marks:
    """Marks tensors; those that are sharded alike share one mark.

    Args:
        degree: Ranks along the axis.
        sources: As in `ShardSpec`.
        whole: As in `ShardSpec`.
        is_weight: As in `ShardSpec`.
        axis: As in `ShardSpec`.
    """

    def __init__(
        self,
        degree: int,
        sources: frozenset[str] = frozenset(),
        whole: Ranges = frozenset(),
        *,
        is_weight: bool = False,
        axis: str = TENSOR_AXIS,
    ) -> None:
        self._degree, self._sources, self._whole, self._is_weight = degree, sources, whole, is_weight
        self._axis = axis
        self._known: dict[Any, ShardSpec] = {}

    def mark(self, tensor: Tensor, placed: Placed) -> Tensor:
        """Mark a tensor as a local shard, and return it."""
        key = (tuple(tensor.shape), tensor.dtype, placed)
        spec = self._known.get(key)
        if spec is not None:
            return attach(tensor, spec)
        mark(
            tensor,
            placed=placed,
            degree=self._degree,
            sources=self._sources,
            whole=self._whole,
            is_weight=self._is_weight,
            axis=self._axis,
        )
        self._known[key] = getattr(tensor, PREFIX + self._axis)
        return tensor


def copy_mark(marked: Tensor, other: Any) -> Any:
    """Copy the marks of one tensor to another, and return that."""
    for axis in AXES:
        spec = spec_of(marked, axis)
        if spec is not None:
            attach(other, spec)
    return other


def exchanged(x: Tensor, exchange: Callable[[Tensor], Tensor], axis: str = TENSOR_AXIS) -> Tensor:
    """Return what an exchange over one axis makes of a tensor, sharded over outer axes as the tensor is.

    Args:
        x: Local.
        exchange: Takes it without marks; returns a tensor of the same dims, whatever their sizes.
        axis: Over which ranks exchange.
    """
    # Written for the compiler, which knows no names that a comprehension binds.
    specs = []
    for outer in AXES:
        if outer == axis:
            break
        spec = spec_of(x, outer)
        if spec is not None:
            specs.append(spec)
    if not specs:
        return exchange(x)
    with torch_compat.without_torch_functions():
        result = exchange(strip(x))
        for spec in specs:
            attach(result, spec)
        return restated(result)


def strip(tensor: Tensor) -> Tensor:
    """Return an unmarked tensor: the same one, or one that shares its memory and graph."""
    if not any(spec_of(tensor, axis) is not None for axis in AXES):
        return tensor
    with torch_compat.without_torch_functions():
        return tensor.view_as(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a shard is contiguous from the beginning of its memory: on one device so is the whole, then."""
    with torch_compat.without_torch_functions():
        return tensor.is_contiguous() and tensor.storage_offset() == 0


def unmark(tensor: Any, axis: str = TENSOR_AXIS) -> None:
    """Remove a tensor's mark of one axis, if it has one."""
    if spec_of(tensor, axis) is not None:
        delattr(tensor, PREFIX + axis)


def sources_of(specs: Sequence[ShardSpec]) -> frozenset[str]:
    """Return the projections that marked tensors were computed from."""
    return frozenset().union(*(spec.sources for spec in specs))


def restated(tensor: Tensor) -> Tensor:
    """Restate the marks of outer axes after one of an inner axis was made or removed, and return the tensor.

    A rank's shard over an outer axis is what the inner ones are shards of, so its global size follows from theirs.
    """
    with torch_compat.without_torch_functions():
        shape = list(tensor.shape)
        for axis in reversed(AXES):
            spec = spec_of(tensor, axis)
            if spec is None:
                continue
            dim = spec.placed.dim
            # Uneven shards have no size that others follow from.
            is_even = spec.shadow.shape[dim] % spec.degree == 0
            shape[dim] = shape[dim] * spec.degree if is_even else spec.shadow.shape[dim]
            if list(spec.shadow.shape) != shape:
                parts = tuple(part * shape[dim] // spec.shadow.shape[dim] for part in spec.placed.parts)
                shadow = shadow_of(shape, tensor.dtype)
                attach(tensor, interned(replace(spec, shadow=shadow, placed=Placed(dim=dim, parts=parts))))
    return tensor


def ranges_of(specs: Sequence[ShardSpec]) -> list[tuple[str, int, int]]:
    """Return (FQN, start, stop) of sharded tensors that come from a single projection's result."""
    return [
        (next(iter(spec.sources)), *spec.features(0, spec.shadow.shape[spec.placed.dim]))
        for spec in specs
        if len(spec.sources) == 1
    ]


def common_parts(specs: Sequence[ShardSpec], size: int) -> tuple[int, ...]:
    """Return the parts of a result's sharded dim, in which its operands have to agree."""
    found = {spec.placed.parts for spec in specs if sum(spec.placed.parts) == size}
    if len(found) > 1:
        raise PropagationError(f"what it joins is sharded in different parts: {sorted(found)}")
    if found:
        return found.pop()
    if any(len(spec.placed.parts) > 1 for spec in specs):
        raise PropagationError("it changes the size of a dim that is sharded in parts")
    return (size,)


def run_of(x: Tensor, piece: Tensor, dim: int) -> tuple[int, int]:
    """Return where a piece of a tensor begins in it along a dim, and how long it is."""
    return (piece.storage_offset() - x.storage_offset()) // max(x.stride(dim), 1), piece.shape[dim]
