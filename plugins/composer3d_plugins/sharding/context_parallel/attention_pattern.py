"""Visibility by position: causal, sliding window, or full; the part of a run of keys that a run of queries sees."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from composer3d_plugins.sharding.context_parallel.sequence_positions import Run

__all__ = ["Kind", "Pattern"]


class Kind(Enum):
    """Visibility of a run of keys to a run of queries."""

    NOTHING = "nothing"
    ALL = "all"
    CAUSAL = "causal"  # the two runs are one, and each query sees the keys up to its own
    ENDING = "ending"  # the last keys are those of a causal block, and all before them are seen
    PART = "part"  # a mask says it


@dataclass(frozen=True)
class Pattern:
    """The keys that a query at position p sees: those at p - behind to p + ahead.

    Positions of queries and keys are compared as they are, where the two sequences differ in length too, as
    `scaled_dot_product_attention(is_causal=True)` does.

    Args:
        behind: Positions before its own; None for all of them.
        ahead: Positions after its own; None for all of them.
    """

    behind: int | None = None
    ahead: int | None = None

    @classmethod
    def causal(cls, window: int | None = None) -> Pattern:
        """Return the causal pattern, in a sliding window of so many keys, its own included, if one is given."""
        return cls(None if window is None else window - 1, 0)

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.behind is None and self.ahead is None

    @property
    def window(self) -> int | None:
        """The number of keys that a query sees at most; None where the length decides it."""
        return None if self.behind is None or self.ahead is None else self.behind + self.ahead + 1

    def kind(self, queries: Run, keys: Run) -> Kind:
        """Return what a run of queries sees of a run of keys."""
        (q_first, q_last), (k_first, k_last) = (queries[0], queries[1] - 1), (keys[0], keys[1] - 1)
        if self.behind is not None and k_last < q_first - self.behind:
            return Kind.NOTHING
        if self.ahead is not None and k_first > q_last + self.ahead:
            return Kind.NOTHING
        sees_behind = self.behind is None or k_first >= q_last - self.behind
        sees_ahead = self.ahead is None or k_last <= q_first + self.ahead
        if sees_behind and sees_ahead:
            return Kind.ALL
        return Kind.CAUSAL if sees_behind and self.ahead == 0 and queries == keys else Kind.PART

    def mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return what queries see of keys, given the positions of both; None for all.

        Args:
            queries: Positions, int64 [L].
            keys: Positions, int64 [M].

        Returns:
            bool [L, M].
        """
        if self.is_full:
            return None
        offset_LM = keys.unsqueeze(0) - queries.unsqueeze(1)
        seen_LM = torch.ones_like(offset_LM, dtype=torch.bool)
        if self.behind is not None:
            seen_LM = seen_LM & (offset_LM >= -self.behind)
        if self.ahead is not None:
            seen_LM = seen_LM & (offset_LM <= self.ahead)
        return seen_LM
