"""Operations of a plugin that shards the sequence, by which a propagation gathers, indexes and attends.

Letters as in `sequence_mode`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["AttentionCall", "Reach", "SequenceRules"]


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of attention on local shards.

    Args:
        q_BHSE: This rank's queries; all of them if `q_length` is None.
        k_BKTE: This rank's keys, of K heads that divide H; all of them if `k_length` is None.
        v_BKTF: This rank's values, as the keys.
        q_length: Global number of queries where they are sharded; else None.
        k_length: Global number of keys where they are sharded; else None.
        mask: Boolean (True is seen) or added to scores, broadcast to [B, H, S, T]; all columns; None without one.
        has_own_rows: Whether the mask's rows are this rank's alone; otherwise they are all queries' (or one for all).
        is_causal: As of torch's function.
        scale: As of torch's function.
        dropout_p: As of torch's function.
        score_mod: As of `flex_attention`, of positions of the whole sequence.
        block_mask: As of `flex_attention`, of the whole sequence.
        of_heads: Returns where weights are dropped of all queries, and of this rank's part of the heads: of its own
            queries they are where the call is.
    """

    q_BHSE: Tensor
    k_BKTE: Tensor
    v_BKTF: Tensor
    q_length: int | None
    k_length: int | None
    mask: Tensor | None = None
    has_own_rows: bool = False
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    score_mod: Callable[..., Tensor] | None = None
    block_mask: Any = None
    of_heads: Callable[..., AbstractContextManager[None]] = lambda **heads: nullcontext()


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Neighbours that a function reads: its result at position t those from t - before to t + after.

    Args:
        read: Lengths of the sequences that follow one another in the dim that is read.
        written: Likewise of the result.
        before: Positions, of the whole dim; may be negative.
        after: Likewise.
    """

    read: tuple[int, ...]
    written: tuple[int, ...]
    before: int
    after: int


class SequenceRules(Protocol):
    """Operations of a plugin that shards the sequence; `index` and `attend` are called with tensors on meta too."""

    def index(self, length: int, device: torch.device) -> Tensor:
        """Return this rank's positions of a sequence of a global length, int64."""

    def local_length(self, length: int) -> int:
        """Return how many of them there are; ranks may have unequal numbers."""

    def divides(self, *, coarse: int, fine: int) -> bool:
        """Return whether all ranks' positions of a length are those of a shorter one, each so many in a row."""

    def gather(self, x: Tensor, *, dim: int, length: int) -> Tensor:
        """Return all positions in order, from this rank's; the gradient is reduce-scattered."""

    def window_sizes(self, reach: Reach) -> list[int] | None:
        """Return the sizes of what each run of this rank's positions reads; None where a rank has no positions."""

    def windows(self, x: Tensor, *, dim: int, reach: Reach) -> Tensor:
        """Return what they read, one after another, with zeros beyond the ends; the gradient is returned likewise."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return o_BHSF of this rank's queries."""

    def weigh(self, weights: Tensor, *, row: int, column: int, rows: int, columns: int) -> None:
        """Look at what a product over all positions multiplies them with.

        Args:
            weights: Of this rank's positions, for all positions.
            row: Its dim of this rank's positions.
            column: Its dim of all positions.
            rows: Global length of the former.
            columns: Of the latter.
        """

    def note(self, what: str, name: str) -> None:
        """Take note of a function: of `attention` or `products` on shards, or that reads `neighbours`.

        Also of one whose arguments were `gathered`, whose result was `narrowed` again, that reads what `follows` a
        position, or that takes positions for `channels`.

        Raises:
            PropagationError: It is to be refused.
        """
