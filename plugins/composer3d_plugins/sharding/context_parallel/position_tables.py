"""Tables of positions that a model's code reads, which a padded sequence may outgrow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer3d import BatchError
from composer3d.propagation import PropagationError, dims_of, name_of

__all__ = ["Table", "Tables", "explained"]

# Errors of code that a longer sequence than its own meets.
OUTGROWN = (AssertionError, IndexError, PropagationError, RuntimeError, ValueError)
READS = frozenset({"__getitem__", "narrow", "index_select"})


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of positions.

    Args:
        where: FQN of the module at work.
        rows: Positions that it has.
    """

    where: str
    rows: int


@dataclass(kw_only=True)
class Tables:
    """Tables that a forward on meta reads by position: those that are indexed, or sliced, with its sequence's length.

    Ids that come from the batch, such as tokens, are no positions.

    Args:
        lengths: Of the batch's sequences.
        given: Tensors of the batch.

    Attributes:
        smallest: The one with the fewest positions.
    """

    lengths: Collection[int]
    given: Sequence[Tensor]
    smallest: Table | None = None
    _own: dict[int, Tensor] = field(default_factory=dict)
    # Kept, so that no other tensor has the id of one of them.
    _of_batch: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._of_batch |= {id(tensor): tensor for tensor in self.given}

    def see(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors that stand for the model's own."""
        self._own |= {id(tensor): tensor for tensor in tensors.values()}

    def note(self, func: Any, args: Sequence[Any], result: Any, where: str) -> None:
        """Look at one function of the forward."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        if isinstance(result, Tensor) and not result.is_floating_point():
            if any(id(x) in self._of_batch for x in tensors):
                self._of_batch[id(result)] = result
        name = name_of(func)
        if name == "embedding" and len(tensors) == 2:
            ids, table = tensors
            if id(ids) not in self._of_batch and set(ids.shape) & set(self.lengths):
                self._found(where, table.shape[0])
        elif name in READS and tensors and id(tensors[0]) in self._own and isinstance(result, Tensor):
            if not any(id(x) in self._of_batch for x in tensors):
                for dim in _indexed(name, args, self.lengths):
                    self._found(where, tensors[0].shape[dim])

    def _found(self, where: str, rows: int) -> None:
        if rows >= max(self.lengths) and (self.smallest is None or rows < self.smallest.rows):
            self.smallest = Table(where=where, rows=rows)


def _indexed(name: str, args: Sequence[Any], lengths: Collection[int]) -> list[int]:
    """Return the dims of a table of which code takes as many as there are positions."""
    if name != "__getitem__":
        dim, last = args[1], args[-1]
        return [dim] if last in lengths or (isinstance(last, Tensor) and last.shape[0] in lengths) else []
    entries = args[1] if isinstance(args[1], tuple) else (args[1],)
    found = dims_of(entries, args[0].ndim)
    return [dim for at, dim in found.items() if _is_of_length(entries[at], lengths)]


def _is_of_length(entry: Any, lengths: Collection[int]) -> bool:
    if isinstance(entry, slice):
        return entry.stop in lengths
    return isinstance(entry, Tensor) and not entry.is_floating_point() and bool(set(entry.shape) & set(lengths))


def explained(forward: Callable[..., Any], padding: Callable[[], tuple[int, int, str] | None]) -> Callable[..., Any]:
    """Return a model's forward whose errors name the padding of the batch, where it has any.

    Args:
        forward: Of the model.
        padding: Returns the batch's length, the padded one, and the lengths to use instead; None where none is padded.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except OUTGROWN as error:
            padded = padding()
            if padded is None or isinstance(error, torch.OutOfMemoryError | torch.distributed.DistError):
                raise
            length, longer, nearest = padded
            raise BatchError(
                f"a sequence of {length} tokens was padded to {longer}, since ranks of cp share it equally, and the "
                f"model's code failed with that ({type(error).__name__}: {str(error).partition(chr(10))[0]}); {nearest}"
            ) from error

    return run
