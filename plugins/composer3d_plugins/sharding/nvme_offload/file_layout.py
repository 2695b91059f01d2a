"""File layout of optimizer moments, and the pieces of parameters that are stepped at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from composer3d import torch_compat
from composer3d_plugins.sharding.nvme_offload.disk import BLOCK, Range, StateFile, padded

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["Fields", "Layout", "Member", "moments", "sharded_as", "split_groups"]

# Elementwise optimizers: a parameter may be divided anywhere.
ELEMENTWISE = frozenset(
    ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)


class Field(NamedTuple):
    """Place of one moment of one parameter: the offset of this rank's shard in the file."""

    offset: int
    dtype: torch.dtype


class Member:
    """A parameter, or a run of its elements, that is stepped as one.

    Args:
        parameter: The optimizer's.
        group: Its parameter group.
        run: Begin and end of the run in this rank's shard, flattened; None takes the whole shard.
    """

    def __init__(self, parameter: Any, group: dict[str, Any], run: tuple[int, int] | None = None) -> None:
        self.parameter, self.group = parameter, group
        self._run = run
        here = torch_compat.local_of(parameter)
        self.start, self.num_elements = (0, here.numel()) if run is None else (run[0], run[1] - run[0])
        self.shape = tuple(here.shape) if run is None else (self.num_elements,)
        self.key = parameter
        if run is not None:
            self.key = here.detach().view(-1)[run[0] : run[1]]
            self.key.grad = torch_compat.local_of(parameter.grad).reshape(-1)[run[0] : run[1]]

    @property
    def is_last(self) -> bool:
        """Whether no run of the parameter comes after it."""
        return self._run is None or self._run[1] == torch_compat.local_of(self.parameter).numel()

    def like(self, value: Tensor) -> Any:
        """Return a moment with the placements of the parameter."""
        return value if self._run is not None else sharded_as(self.parameter, value)

    def begin(self, states: Any) -> None:
        """Copy a parameter's state that is not on disk, such as the step count, for a run."""
        if self._run is not None:
            kept = states.get(self.parameter, {})
            states[self.key] |= {name: _copied(value) for name, value in kept.items()}

    def end(self, states: Any) -> None:
        """Store state that is not on disk between steps; of a parameter's runs the last one's."""
        kept = {name: value for name, value in states[self.key].items() if not _is_moment(self, value)}
        if self._run is None:
            states[self.parameter] = kept
            return
        del states[self.key]
        if self.is_last:
            states[self.parameter] = kept


def moments(member: Member, states: Any) -> dict[str, Any]:
    """Return the state that has its parameter's shape; everything else stays in memory."""
    return {name: value for name, value in states[member.key].items() if _is_moment(member, value)}


def split_groups(groups: list[dict[str, Any]], piece_bytes: int, cls: type[Optimizer]) -> Iterator[list[Member]]:
    """Divide parameters with gradients into pieces; large ones into runs, if the optimizer is elementwise."""
    divides = cls.__name__ in ELEMENTWISE and cls.__module__.startswith("torch.optim")
    piece: list[Member] = []
    size_bytes = 0
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            here = torch_compat.local_of(parameter)
            own_bytes = here.numel() * here.element_size()
            if piece and size_bytes + own_bytes > piece_bytes:
                yield piece
                piece, size_bytes = [], 0
            if own_bytes > piece_bytes and divides and here.is_contiguous():
                length = max(piece_bytes // here.element_size() // BLOCK, 1) * BLOCK
                for start in range(0, here.numel(), length):
                    yield [Member(parameter, group, (start, min(start + length, here.numel())))]
            else:
                piece.append(Member(parameter, group))
                size_bytes += own_bytes
    if piece:
        yield piece


class Fields:
    """The moments of all parameters in one file; those that are stepped together are adjacent."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._fields: dict[Any, dict[str, Field]] = {}
        self._written: dict[Any, frozenset[str]] = {}

    def written(self) -> Iterator[tuple[Any, str, Field]]:
        """Yield the moments that the file has whole."""
        for parameter, names in self._written.items():
            for name in sorted(names):
                yield parameter, name, self._fields[parameter][name]

    def keep_only(self, states: Mapping[Any, Any]) -> None:
        """Drop parameters without state, such as those for which a loaded checkpoint has none."""
        self._written = {parameter: names for parameter, names in self._written.items() if parameter in states}

    def add(self, member: Member, values: Mapping[str, Any]) -> None:
        """Reserve space for moments that are not in the file yet: for the whole shard, even for a run of it."""
        names = self._fields.setdefault(member.parameter, {})
        for name, value in values.items():
            if name not in names:
                num_bytes = torch_compat.local_of(member.parameter).numel() * value.dtype.itemsize
                names[name] = Field(self._file.reserve(num_bytes), value.dtype)

    def reading(self, piece: list[Member]) -> Layout:
        """Return the layout of a piece's moments that the file has."""
        return _laid_out([(member, self._those(member, self._written.get(member.parameter, ()))) for member in piece])

    def writing(self, piece: list[Member], names: Mapping[Member, Iterable[str]]) -> Layout:
        """Return the layout to write a piece's moments, and mark those complete whose last run this is."""
        self._written |= {member.parameter: frozenset(names[member]) for member in piece if member.is_last}
        return _laid_out([(member, self._those(member, names[member])) for member in piece])

    def _those(self, member: Member, names: Iterable[str]) -> dict[str, Field]:
        return {name: field for name, field in self._fields.get(member.parameter, {}).items() if name in names}


class Place(NamedTuple):
    """Place of a moment in a piece's memory."""

    member: Member
    name: str
    position: int
    dtype: torch.dtype


class Layout(NamedTuple):
    """Layout of a piece in memory and in the file.

    Args:
        places: Of its moments in memory.
        ranges: Byte ranges to read or write; adjacent ones are merged.
        num_bytes: Size of its memory.
    """

    places: list[Place]
    ranges: list[Range]
    num_bytes: int


def _laid_out(members: list[tuple[Member, dict[str, Field]]]) -> Layout:
    places: list[Place] = []
    ranges: list[Range] = []
    position = 0
    for member, fields in members:
        for name, field in fields.items():
            places.append(Place(member, name, position, field.dtype))
            num_bytes = padded(member.num_elements * field.dtype.itemsize)
            offset = field.offset + member.start * field.dtype.itemsize
            if ranges and ranges[-1].offset + ranges[-1].num_bytes == offset:
                ranges[-1] = ranges[-1]._replace(num_bytes=ranges[-1].num_bytes + num_bytes)
            elif num_bytes:
                ranges.append(Range(offset, position, num_bytes))
            position += num_bytes
    return Layout(places, ranges, position)


def sharded_as(parameter: Any, value: Tensor) -> Any:
    """Return a local tensor as a DTensor with the placements of a parameter, if that is one."""
    from torch.distributed.tensor import DTensor

    return torch_compat.with_local(parameter, value) if isinstance(parameter, DTensor) else value


def _is_moment(member: Member, value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return shape is not None and len(shape) > 0 and tuple(shape) == tuple(member.key.shape)


def _copied(value: Any) -> Any:
    import torch

    return value.clone() if isinstance(value, torch.Tensor) else value
