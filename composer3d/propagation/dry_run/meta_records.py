"""Records of runs on meta, to compare two of them: functions, their arguments, and the tensors that they took."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer3d import torch_compat
from composer3d.propagation.functions.function_dims import EXPANDS, SPLITS, VIEWS, name_of
from composer3d.propagation.functions.random_functions import draws
from composer3d.propagation.functions.view_shapes import Placed

__all__ = ["Record"]

# Their results' shapes and places in memory tell all that sizes among their arguments do.
SHAPED = VIEWS | EXPANDS | SPLITS | {"narrow", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty", "repeat"}
PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, type(None), type(Ellipsis))


class Record:
    """Record of one run.

    Two runs with equal entries compute the same: each entry is a function with its numbers, the tensors it took, told
    by the order in which they came up, and shape, dtype and place in memory of what it gave.

    Attributes:
        entries: What is compared.
        places: The innermost module at work at each entry.
        placed: The sharded dim of what was drawn last.
        entered: Modules that were entered.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.places: list[str] = []
        self.placed: Placed | None = None
        self.entered: set[str] = set()
        self._drawn: dict[int, Placed | None] = {}
        self._order: dict[int, int] = {}
        # A tensor that was freed would leave its identity to another one.
        self._kept: list[Tensor] = []
        self._stack: list[str] = []
        self._is_apart = False

    def enter(self, fqn: str) -> None:
        """Enter a module: entries are noted as its own."""
        self._stack.append(fqn)
        self.entered.add(fqn)

    def leave(self) -> None:
        """Leave the innermost module."""
        self._stack.pop()

    @contextlib.contextmanager
    def drawing_apart(self) -> Iterator[None]:
        """Note random draws inside as draws from the sharded stream."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    def note(
        self,
        func: Any,
        args: Sequence[Any],
        options: Mapping[str, Any],
        result: Any,
        *,
        has_acted: bool = False,
        is_apart: bool = False,
    ) -> None:
        """Append an entry for a function that returned tensors.

        Args:
            func: The function, or the name of a module that stands for several.
            args: Global sizes, as in the code.
            options: Keyword arguments, likewise.
            result: On local shards.
            has_acted: Whether an operand was gathered, narrowed or given a summed gradient for it.
            is_apart: Whether it drew from the sharded stream.
        """
        with torch_compat.without_torch_functions():
            if not any(isinstance(leaf, Tensor) for leaf in torch_compat.tree_leaves(result)):
                return
            name = func if isinstance(func, str) else name_of(func)
            is_shaped = name in SHAPED or (name == "__getitem__" and _is_basic(args[1]))
            given = tuple(self._tensors([list(args), options])) if is_shaped else self._values([list(args), options])
            stream = draws(name, args, options) and ("sharded" if is_apart or self._is_apart else "replicated")
            if is_apart:
                self._drawn[len(self.entries)] = self.placed
            self.entries.append((name, given, self._results(result), has_acted, stream))
            self.places.append(self._stack[-1] if self._stack else "")

    def agreeing(self, other: Record) -> int:
        """Return the length of the common prefix of two records."""
        pairs = zip(self.entries, other.entries, strict=False)
        return next(
            (at for at, (one, two) in enumerate(pairs) if one != two), min(len(self.entries), len(other.entries))
        )

    def place(self, at: int) -> str:
        """Return the module at work at an entry, or at the last one."""
        return self.places[min(at, len(self.places) - 1)] if self.places else ""

    def draws_apart(self, at: int) -> bool:
        """Return whether an entry drew from the sharded stream."""
        return at < len(self.entries) and self.entries[at][4] == "sharded"

    def placed_in(self, fqn: str) -> Placed | None:
        """Return the sharded dim of all that a module, and those in it, drew; None where they differ."""
        placed = {p for at, p in self._drawn.items() if f"{self.places[at]}.".startswith(f"{fqn}.")}
        return placed.pop() if len(placed) == 1 else None

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._order:
            self._order[id(tensor)] = len(self._order)
            self._kept.append(tensor)
        return self._order[id(tensor)]

    def _tensors(self, value: Any) -> list[Any]:
        return [
            (self._number(leaf), tuple(leaf.shape))
            for leaf in torch_compat.tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]

    def _values(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return ("tensor", self._number(value), tuple(value.shape))
        if isinstance(value, list | tuple):
            return tuple(map(self._values, value))
        if isinstance(value, dict):
            return tuple((key, self._values(each)) for key, each in value.items())
        if isinstance(value, slice):
            return ("slice", value.start, value.stop, value.step)
        return value if isinstance(value, PLAIN) else type(value)

    def _results(self, result: Any) -> tuple[Any, ...]:
        return tuple(
            (self._number(leaf), tuple(leaf.shape), leaf.dtype, leaf.stride(), leaf.storage_offset())
            for leaf in torch_compat.tree_leaves(result)
            if isinstance(leaf, Tensor)
        )


def _is_basic(index: Any) -> bool:
    """Return whether an index makes a view, whose place in memory tells what was taken."""
    entries = index if isinstance(index, tuple) else (index,)
    return all(isinstance(entry, int | slice | type(None) | type(Ellipsis)) for entry in entries)
