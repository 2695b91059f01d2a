"""Dims of what a model draws that are as long as its sequence, found from runs on meta for two lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer3d.propagation import call_of, may_draw, name_of

__all__ = ["DrawnDims"]


@dataclass(kw_only=True)
class DrawnDims:
    """The dims of tensors of random numbers that are of positions: those that differ between two runs.

    Attributes:
        runs: Of each, the shapes in order.
        is_seeded: Whether it draws tensors with positions from generators that it seeds, one number after another.
    """

    runs: list[list[tuple[int, ...]]] = field(default_factory=list)
    is_seeded: bool = False
    _seeded: set[int] = field(default_factory=set)  # indices of draws from the code's own generators
    _seed: int = 0
    _varied: set[tuple[int, int]] = field(default_factory=set)
    _fixed: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    def begin(self, seed: int) -> None:
        """Begin a run, in which torch's generators have a seed."""
        self.runs.append([])
        self._seed = seed

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Look at one function of the run at hand."""
        name = name_of(func)
        if name == "multi_head_attention_forward" and (given := call_of(args, kwargs)) is not None:
            query, key = given["query"], given["key"]
            if query.dim() == 3:
                self.runs[-1].append((query.shape[1], given["num_heads"], query.shape[0], key.shape[0]))
        elif may_draw(name) and isinstance(result, Tensor):
            if kwargs.get("generator") is not None or torch.default_generator.initial_seed() != self._seed:
                self._seeded.add(len(self.runs[-1]))
            self.runs[-1].append(tuple(result.shape))

    def compare(self) -> None:
        """Compare two runs; nothing is known where they draw other tensors."""
        first, second = self.runs
        if len(first) != len(second) or any(len(a) != len(b) for a, b in zip(first, second, strict=True)):
            self.is_seeded = bool(self._seeded)
            return
        self.is_seeded = any(first[index] != second[index] for index in self._seeded)
        for one, other in zip(first, second, strict=True):
            for dim, (size, again) in enumerate(zip(one, other, strict=True)):
                if size != again:
                    self._varied.add((len(one), dim))
                else:
                    self._fixed.setdefault((len(one), dim), set()).add(size)

    def is_position(self, ndim: int, dim: int, size: int) -> bool | None:
        """Return whether a dim of a size is one of positions; None where that is unknown."""
        fixed = self._fixed.get((ndim, dim))
        if (ndim, dim) not in self._varied:
            return None if fixed is None else False
        return None if fixed is not None and size in fixed else True
