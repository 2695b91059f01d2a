"""Places in a model's code that draw random numbers, and draws that a recomputation repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d.observation.call_sites import caller
from composer3d.step.random_numbers.counter_random import Rows

if TYPE_CHECKING:
    from composer3d.interfaces import Part
    from composer3d.mesh.held_shards import Shards

__all__ = ["Callers", "Draw", "Drawn", "Site", "argument"]


class Callers:
    """Modules whose code draws.

    Args:
        parts: Called for this rank's modules.
    """

    def __init__(self, parts: Callable[[], Sequence[Part]]) -> None:
        self._parts = parts
        self._names: dict[int, str] = {}
        self._split: dict[int, int] = {}  # stages of modules that several of them call

    def caller(self, *, is_loss: bool) -> tuple[str, str, int | None]:
        """Return the FQN of the module whose code draws, the user's place, and the stage if several call the module."""
        if not self._names:
            for part in self._parts():
                for fqn, module in part.module.named_modules():
                    self._names.setdefault(id(module), part.firsts.get(fqn, fqn))
                    if any(f"{fqn}.".startswith(f"{other}.") for other in part.called_elsewhere):
                        self._split[id(module)] = part.index
        owner, place = caller(self._names)
        if is_loss or owner is None:
            return ("loss" if is_loss else ""), place, None
        return self._names[owner], place, self._split.get(owner)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One call of a function that draws.

    Args:
        shape: Of what it draws, or drops from.
        by_sample: Called with a key, rows, and the shard of a tensor that has the shape; returns what the function
            returns. None where that is not possible.
        batch_dim: The dim of the shape that holds the samples.
        is_called: The function itself is called for every sample, so it has to have whole samples.
        written: Calls other functions that come to the same, and that draw.
    """

    shape: tuple[int, ...]
    by_sample: Callable[[int, Rows, Shards | None], Any] | None
    batch_dim: int = 0
    is_called: bool = False
    written: Callable[[], Any] | None = None

    def has_samples(self, count: int, shard: Shards | None = None) -> bool:
        """Return whether the leading dim holds so many samples."""
        if self.by_sample is None or (shard is not None and (self.is_called or not shard.fits(self.shape))):
            return False
        shape = self.shape if shard is None else shard.whole(self.shape)
        leads = shape[self.batch_dim] if len(shape) > self.batch_dim else 0
        return leads > 0 and leads % count == 0

    def is_common(self, count: int) -> bool:
        """Return whether it is a single number for all of so many samples, as one that decides of a whole layer."""
        return self.by_sample is not None and math.prod(self.shape) == 1 and not self.has_samples(count)


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call by its place or name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place in the code that draws.

    Args:
        fqn: Of the module whose code draws; "loss" for a loss.
        function: Of torch.
        place: File and line.
        shape: Of what is drawn for a micro-batch.
        num_samples: Of that micro-batch.
        by_sample: Whether every sample has its own numbers, or all have one number, in every layout the same.
    """

    fqn: str
    function: str
    place: str
    shape: tuple[int, ...]
    num_samples: int
    by_sample: bool

    def __str__(self) -> str:
        return f"{self.function} in {self.fqn or 'the model'}{f', {self.place}' if self.place else ''}"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One draw, to be repeated by a recomputation.

    Args:
        key: Its own.
        rows: Samples of its micro-batch.
        after: The seed that the default generators have after it.
    """

    key: int
    rows: Rows
    after: int
