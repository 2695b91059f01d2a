"""Tokens that all ranks of a group have: each exchanges a part of them, so that none travels twice.

Shape suffixes: T tokens, K experts a token, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from composer3d_plugins.sharding.expert_parallel.token_exchange import all_gather, exchanged, padded

__all__ = ["exchange_parts"]


def _rows_of(num_rows: int, group: Any) -> slice:
    length = -(-num_rows // dist.get_world_size(group))
    first = min(num_rows, dist.get_rank(group) * length)
    return slice(first, min(num_rows, first + length))


def _part(x: Tensor, *, group: Any) -> Tensor:
    """Return this rank's rows of tokens that all ranks have."""
    return x[_rows_of(x.shape[0], group)].clone()


def _all_parts(x: Tensor, *, num_rows: int, group: Any) -> Tensor:
    return all_gather(padded(x, -(-num_rows // dist.get_world_size(group)), 0.0), group=group)[:num_rows]


def exchange_parts(
    exchange: Callable[..., Tensor], hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, *, group: Any
) -> Tensor:
    """Exchange tokens that all ranks of a group have, a part of them by each, so that none travels twice.

    Args:
        exchange: Given tokens, their experts and weights, returns the results.
        hidden_TD: Tokens.
        index_TK: Experts of each.
        weights_TK: Of what they return.
        group: Process group of ranks with the same tokens, and the same gradients of what is returned.

    Collectives: beside those of the exchange 1 all-gather forward (results), 2 backward (gradients of tokens and of
    weights).
    """
    mine, num_rows = _rows_of(hidden_TD.shape[0], group), hidden_TD.shape[0]
    part, gather = partial(_part, group=group), partial(_all_parts, num_rows=num_rows, group=group)
    out_TD = exchange(exchanged(hidden_TD, part, gather), index_TK[mine], exchanged(weights_TK, part, gather))
    return exchanged(out_TD, gather, part)
