"""Sources of training data: numbered samples, and a record of their origin."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from composer3d.composition import indices

__all__ = ["IGNORED", "Report", "Sample", "Source", "num_held_out"]

# Targets of this value carry no loss: the default of torch's cross entropy and of composer3d's count of valid tokens.
IGNORED = -100

# The inputs are a tensor or `Inputs`; the targets a tensor, a nested tuple or dict of them, or None.
Sample: TypeAlias = tuple[Any, Any]
Report: TypeAlias = Callable[[str], None]


class Source(ABC):
    """Numbered samples of (inputs, targets); for text the targets are the next tokens.

    Args:
        vocab_size: Every token is below it; None where unknown.
        evaluation: The samples held out, None where there are none.
    """

    def __init__(self, *, vocab_size: int | None, evaluation: Source | None = None) -> None:
        self.vocab_size = vocab_size
        self.evaluation = evaluation

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """Return the number of tokens of each sample; None if samples must be read to count them."""
        return None

    @property
    def modified(self) -> dict[str, int]:
        """Return when each file was last changed, of files that no digest covers whole; nanoseconds since 1970."""
        return {}

    @property
    def draws(self) -> bool:
        """Return whether reading a sample may draw random numbers; they are then seeded by the sample's position."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """Return (inputs, targets) of one sample."""

    def samples_at(self, positions: NDArray[np.int64], *, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Return the samples at positions of the endless stream, which must lie close together."""
        first, last = int(positions.min()), int(positions.max())
        return indices(first, last - first + 1, size=len(self), seed=seed, shuffle=shuffle)[positions - first]

    def order_facts(self) -> dict[str, Any]:
        """Return what the order of samples depends on besides the seed and their number; JSON values."""
        return {}

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the source's entry in the run's record: kind, sha256, counts, tokenizer; JSON values."""


def num_held_out(num_samples: int, fraction: float) -> int:
    """Return how many samples, at the end, are for evaluation: the fraction rounded up, but at least one is left."""
    return min(math.ceil(num_samples * fraction - 1e-9), num_samples - 1)
