"""Places in a model's code that draw random numbers, and draws that a recomputation repeats."""

from __future__ import annotations

from dataclasses import dataclass

from composer3d.step.random_numbers.counter_random import Rows

__all__ = ["Drawn", "Site"]


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
