"""Axes, degrees and coordinates: pure functions of the manifest's `[mesh]` and a rank."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from types import MappingProxyType
from typing import Any

from composer3d.errors import MeshError, NothingShared

__all__ = ["AXES", "BESIDE_EXPERTS", "Axis", "Layout", "Role", "arrange", "crossings", "resolve"]

_LARGEST_WORLD = 1 << 20
BESIDE_EXPERTS = "efsdp"  # what is left of them


class Role(enum.Enum):
    """Role of an axis: what its ranks have in common; determines counts, losses, norms and random streams."""

    BATCH = "batch"  # other samples, the same parameters
    SEQUENCE = "sequence"  # other positions of the same samples
    TENSOR = "tensor"  # the same samples, other slices of the parameters
    STAGE = "stage"  # the same samples, other layers
    EXPERT = "expert"  # carved out of the batch and sequence axes, does not multiply the world
    INDEPENDENT = "independent"  # models of their own (local SGD): outside the numerical contract and the norm
    REPLICA = "replica"  # whole groups of ranks, each a world of its own: outside of its mesh, they come and go


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A mesh axis.

    Args:
        name: As it stands in `[mesh]`.
        role: What its ranks share.
        inside: The axis that it stands directly inside of, for axes that plugins declare; None is outermost.
        has_shards: Whether ranks along it may hold shards of the parameters, though each computes with all of them.
    """

    name: str
    role: Role
    inside: str | None = None
    has_shards: bool = False


AXES = (
    Axis(name="pp", role=Role.STAGE),
    Axis(name="dp_replicate", role=Role.BATCH),
    Axis(name="dp_shard", role=Role.BATCH, has_shards=True),
    Axis(name="cp", role=Role.SEQUENCE),
    Axis(name="tp", role=Role.TENSOR),
    Axis(name="ep", role=Role.EXPERT),
)
_REPLICAS, _SHARDS = (
    next(a.name for a in AXES if a.role is Role.BATCH and a.has_shards is has) for has in (False, True)
)
# Axes out of which those of experts are carved, and tp where these are not enough.
_CARVED = (_SHARDS, *(axis.name for axis in AXES if axis.role is Role.SEQUENCE))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Axes with their degrees, outermost first: ranks are numbered as in a C array of this shape."""

    axes: tuple[Axis, ...]
    degrees: Mapping[str, int]
    _products: dict[tuple[Role, ...], int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _alike: dict[Any, tuple[tuple[int, ...], ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def dense_axes(self) -> tuple[Axis, ...]:
        """The axes that multiply to the world: all but experts, and groups of ranks that are worlds of their own."""
        return tuple(axis for axis in self.axes if axis.role not in (Role.EXPERT, Role.REPLICA))

    @property
    def num_groups(self) -> int:
        """The number of groups of ranks, each of `world_size`, that train one model and come and go."""
        return self.degree(Role.REPLICA)

    @property
    def num_readers_of_all_groups(self) -> int:
        """The number of ranks that read samples of their own, over all models and all groups."""
        return self.degree(Role.BATCH, Role.INDEPENDENT, Role.REPLICA)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all groups."""
        return self.num_groups * self.world_size

    @cached_property
    def world_size(self) -> int:
        """The number of ranks of a group."""
        return math.prod(self.degrees[axis.name] for axis in self.dense_axes)

    @property
    def shards(self) -> str:
        """The axis over which data-parallel plugins shard parameters, or their optimizer state."""
        return _SHARDS

    @property
    def replicas(self) -> str:
        """The axis along which data-parallel plugins replicate parameters."""
        return _REPLICAS

    @property
    def beside_experts(self) -> int:
        """The number of ranks out of which an axis of experts is carved, without those of tensor axes."""
        return math.prod(self.degrees[name] for name in _CARVED)

    def names(self, *roles: Role) -> tuple[str, ...]:
        """Return the names of the axes with one of these roles, outermost first."""
        return tuple(axis.name for axis in self.axes if axis.role in roles)

    def degree(self, *roles: Role) -> int:
        """Return the product of the degrees of the axes with one of these roles."""
        try:
            return self._products[roles]  # steps ask
        except KeyError:
            return self._products.setdefault(roles, math.prod(self.degrees[name] for name in self.names(*roles)))

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return the rank's index along every axis, `ep` included."""
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank {rank} is not in a world of {self.world_size} ranks")
        result: dict[str, int] = {}
        rest = rank
        for axis in reversed(self.dense_axes):
            rest, result[axis.name] = divmod(rest, self.degrees[axis.name])
        for name in self.names(Role.EXPERT):
            places = [(result[axis], self.degrees[axis]) for axis in self.carved_from(name)]
            result[name] = reduce(lambda index, place: index * place[1] + place[0], places, 0) % self.degrees[name]
        return MappingProxyType({axis.name: result[axis.name] for axis in self.axes if axis.role is not Role.REPLICA})

    def carved_from(self, expert: str) -> tuple[str, ...]:
        """Return the dense axes whose ranks an axis of experts divides among them, outermost first.

        dp_shard and cp; tensor axes too where its degree does not divide theirs, for it is then as many whole groups.
        """
        if self.beside_experts % self.degrees[expert] == 0:
            return _CARVED
        return (*_CARVED, *self.names(Role.TENSOR))

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """Return the dense axes that a dim of a mesh view is made of, given its name; nothing for another mesh's."""
        if dim == BESIDE_EXPERTS or dim in self.names(Role.EXPERT):
            return tuple(dict.fromkeys(axis for name in self.names(Role.EXPERT) for axis in self.carved_from(name)))
        return tuple(axis.name for axis in self.dense_axes if axis.name in dim.split("+"))

    def index(self, rank: int, *roles: Role) -> int:
        """Return the rank's flat index over the axes with one of these roles; for example its data-parallel rank."""
        coordinates, result = self.coordinates(rank), 0
        for name in self.names(*roles):
            result = result * self.degrees[name] + coordinates[name]
        return result

    def alike(self, ranks: Sequence[int], axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return groups of positions of ranks that have the same place along dense axes; those of one are left out.

        Found once for the same question: of 16,384 ranks each takes 0.1 s of CPU time.

        Args:
            ranks: Of this world.
            axes: Names of dense axes.

        Memory: a number for each rank, kept as long as the layout.
        """
        key = ranks if isinstance(ranks, range) else tuple(ranks), tuple(axes)
        if key not in self._alike:
            strides, stride = [], 1
            for axis in reversed(self.dense_axes):
                if axis.name in axes:
                    strides.append((stride, self.degrees[axis.name]))
                stride *= self.degrees[axis.name]
            found: dict[tuple[int, ...], list[int]] = {}
            for position, rank in enumerate(key[0]):
                place = tuple([rank // stride % degree for stride, degree in strides if degree > 1])
                found.setdefault(place, []).append(position)
            self._alike[key] = tuple(tuple(group) for group in found.values() if len(group) > 1)
        return self._alike[key]

    def who(self, rank: int) -> str:
        """Return `rank 3 (dp_shard 1, tp 1)`: a rank with its place along the axes that have more than one."""
        coordinates = self.coordinates(rank)
        places = [f"{axis.name} {coordinates[axis.name]}" for axis in self.dense_axes if self.degrees[axis.name] > 1]
        return f"rank {rank}" + (f" ({', '.join(places)})" if places else "")

    def between(self, rank: int, other: int) -> tuple[str, ...]:
        """Return the axes along which two ranks lie apart, outermost first."""
        one, two = self.coordinates(rank), self.coordinates(other)
        return tuple(axis.name for axis in self.dense_axes if one[axis.name] != two[axis.name])

    def span(self, ranks: Sequence[int]) -> str:
        """Return the axes along which ranks lie apart, as the name of a group of them; `world` for all ranks."""
        if len(ranks) == self.world_size:
            return "world"
        places = [self.coordinates(rank) for rank in ranks]
        return " x ".join(axis.name for axis in self.dense_axes if len({place[axis.name] for place in places}) > 1)

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that the rank meets along an axis, itself among them, ascending.

        They differ from it in that coordinate alone; along an axis that is carved out of others, in those of the
        others that the carved one takes in.
        """
        stride, strides = 1, {}
        for dense in reversed(self.dense_axes):
            strides[dense.name] = stride
            stride *= self.degrees[dense.name]
        here = self.coordinates(rank)
        if axis in strides:
            first = rank - here[axis] * strides[axis]
            return tuple(first + index * strides[axis] for index in range(self.degrees[axis]))
        # cp is directly inside of dp_shard, so both together are one axis with cp's stride.
        flat = here["dp_shard"] * self.degrees["cp"] + here["cp"]
        first = rank - here["dp_shard"] * strides["dp_shard"] - here["cp"] * strides["cp"]
        begin = flat - flat % self.degrees[axis]
        members = (divmod(begin + index, self.degrees["cp"]) for index in range(self.degrees[axis]))
        return tuple(first + shard * strides["dp_shard"] + cp * strides["cp"] for shard, cp in members)

    def leaves_node(self, axis: str, ranks_per_node: int) -> bool:
        """Return whether some ranks that lie apart along a dense axis, or one inside of it, are on different nodes.

        Args:
            axis: Its name.
            ranks_per_node: Ranks are numbered node by node.
        """
        names = [each.name for each in self.dense_axes]
        span = math.prod(self.degrees[name] for name in names[names.index(axis) :])
        return self.world_size > ranks_per_node and (span > ranks_per_node or ranks_per_node % span > 0)

    def __str__(self) -> str:
        groups = [f"{name}={self.degrees[name]}" for name in self.names(Role.REPLICA)]
        return " x ".join([*groups, *(f"{axis.name}={self.degrees[axis.name]}" for axis in self.dense_axes)])


def arrange(extra: Sequence[Axis]) -> tuple[Axis, ...]:
    """Insert the axes that plugins declare into the standard ones.

    Raises:
        MeshError: A name is taken, or `inside` names no axis.
    """
    axes = list(AXES)
    for axis in sorted(extra, key=lambda axis: axis.name):
        if any(axis.name == other.name for other in axes):
            raise MeshError(f'the axis "{axis.name}" is declared twice')
        places = [index for index, other in enumerate(axes) if other.name == axis.inside]
        if axis.inside is not None and not places:
            raise MeshError(f'the axis "{axis.name}" is to stand inside "{axis.inside}", which is no axis')
        axes.insert(places[0] + 1 if places else 0, axis)
    return tuple(axes)


def resolve(
    stated: Mapping[str, int | None], *, axes: Sequence[Axis], world_size: int | None, default: str | None
) -> Layout:
    """Fill in unnamed degrees and the one that is -1.

    Args:
        stated: The degrees of `[mesh]`; None where the manifest names none.
        axes: From `arrange`.
        world_size: The number of ranks of a group; None takes the product of what is stated, with 1 for what is open.
        default: The axis that takes the ranks which are left, where none is -1: the data-parallel plugin's.

    Raises:
        MeshError: With the product and the world, or the axes that are both -1.
    """
    degrees = {axis.name: stated.get(axis.name) for axis in axes}
    open_axes = [name for name, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise MeshError(f"only one axis may be -1, not {' and '.join(open_axes)}")
    if open_axes == ["ep"]:
        raise MeshError("ep cannot be -1: it is carved out of dp_shard x cp x tp, and takes no ranks")
    for name in (axis.name for axis in axes if axis.role is Role.REPLICA and degrees[axis.name] == -1):
        raise MeshError(f"{name} cannot be -1: a group of ranks does not know how many others there are; state it")
    dense = [axis.name for axis in axes if axis.role not in (Role.EXPERT, Role.REPLICA)]
    if not open_axes and default is not None and degrees[default] is None:
        open_axes = [default]
    filled = {name: 1 if degree is None or degree == -1 else degree for name, degree in degrees.items()}
    known = math.prod(filled[name] for name in dense)
    if world_size is not None and open_axes and world_size % known == 0:
        filled[open_axes[0]] = world_size // known
    layout = Layout(axes=tuple(axes), degrees=MappingProxyType(filled))
    if world_size is not None and layout.world_size != world_size:
        shown = " x ".join(f"{name}={filled[name]}" for name in dense if filled[name] > 1 or stated.get(name))
        if not shown:
            raise NothingShared(
                f"the world has {world_size} ranks, and no plugin of this manifest shares work among them; name one "
                '(composer3d plugins lists those of the family "sharding"), or start 1 rank'
            )
        product = f"{shown} = {layout.world_size}" if " x " in shown else shown
        raise MeshError(f"{product}, but the world has {world_size} ranks")
    if layout.num_ranks > _LARGEST_WORLD:
        raise MeshError(
            f"the degrees multiply to {layout.num_ranks} ranks, and {_LARGEST_WORLD} are the most there can be"
        )
    carved, inner, ep = layout.beside_experts, layout.degree(Role.TENSOR), filled["ep"]
    if carved % ep and inner == 1:
        remedy = f"write dp_shard = {ep}, or a multiple of it"
        raise MeshError(f"ep={ep} does not divide dp_shard x cp = {carved}, which it is carved out of; {remedy}")
    if carved % ep and (carved * inner % ep or ep % inner):
        raise MeshError(
            f"ep={ep} neither divides dp_shard x cp = {carved}, nor does it divide dp_shard x cp x tp = "
            f"{carved * inner} and is a multiple of tp = {inner}: it is carved out of the one or the other"
        )
    return layout


def crossings(layout: Layout, gpus_per_node: int) -> tuple[str, ...]:
    """Return which of tp and cp reach over the edge of a node: their groups would communicate over the slow network."""
    names = [name for name in reversed(layout.names(Role.TENSOR, Role.SEQUENCE)) if layout.degrees[name] > 1]
    return tuple(name for name in names if layout.leaves_node(name, gpus_per_node))
