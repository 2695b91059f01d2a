"""Attention of a sequence that is sharded over ranks: one function for every method.

Shape suffixes: B batch, H heads of queries, K heads of keys and values (H is a multiple), L queries and M keys of this
rank, S and T queries and keys of the whole sequence, E head dim, F head dim of values.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509; Fang and Zhao, USP, arXiv:2405.07719.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from composer3d.propagation import attend_drawing
from composer3d_plugins.sharding.context_parallel.attention_methods import Method, head_repeats
from composer3d_plugins.sharding.context_parallel.attention_pattern import Pattern
from composer3d_plugins.sharding.context_parallel.sequence_groups import SequenceGroup
from composer3d_plugins.sharding.context_parallel.sequence_operators import (
    Way,
    block_attention,
    exchange_heads,
    gather_sequence,
)
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions

__all__ = ["Attention", "SequencePlan", "attend", "local_attention"]

WAYS: Mapping[Method, Way] = {Method.RING: "ring", Method.GATHER_ONCE: "gather_once"}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Arguments of an attention, besides its queries, keys and values.

    Args:
        pattern: Visibility by position.
        mask: bool, True where a key is visible, or additive: [B|1, H|1, S|L|1, T|1], of fewer dims too. Its rows are
            the whole sequence's, which are taken by position, or this rank's, which ulysses and usp gather; its columns
            are the whole sequence's.
        scale: Factor of scores; default 1 / sqrt(E).
        softcap: c of c * tanh(score / c); 0 for none.
        dropout: Probability with which weights become 0.
        of_heads: As of `AttentionCall`.
    """

    pattern: Pattern = Pattern()
    mask: torch.Tensor | None = None
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    of_heads: Callable[..., AbstractContextManager[None]] = lambda **heads: nullcontext()

    @property
    def needs_autograd(self) -> bool:
        """Whether the operators of blocks do not compute it: dropout, or a bias with a gradient."""
        return self.dropout > 0 or (self.mask is not None and self.mask.requires_grad)


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Part of sharded attention that does not depend on values; made once, outside of what is compiled.

    Args:
        method: How; not `auto`.
        group: The ranks.
        rows: Positions of queries by rank.
        columns: Positions of keys by rank.
        whole: All positions of keys, on one rank.
        exchanged: Of ulysses and usp, of queries and of keys: where the positions of a rank's inner group lie in it.
        grouped: Of ulysses and usp, of queries and of keys: the positions of all inner groups.
    """

    method: Method
    group: SequenceGroup
    rows: Positions
    columns: Positions
    whole: Positions
    exchanged: tuple[Positions, Positions]
    grouped: tuple[Positions, Positions]

    @classmethod
    def of(
        cls, method: Method, group: SequenceGroup, rows: Positions, columns: Positions | None = None
    ) -> SequencePlan:
        """Return the plan of a method.

        Args:
            method: How; not `auto`.
            group: The ranks.
            rows: Positions of queries by rank.
            columns: Positions of keys by rank, where they are another sequence.
        """
        columns = columns or rows
        degree = group.inner_degree if method is Method.USP else group.degree
        first = group.rank - group.rank % degree
        return cls(
            method=method,
            group=group,
            rows=rows,
            columns=columns,
            whole=Positions.whole(columns.length),
            exchanged=(rows.within(first, degree), columns.within(first, degree)),
            grouped=(rows.grouped(degree), columns.grouped(degree)),
        )


def attend(
    q_BHLE: torch.Tensor, k_BKME: torch.Tensor, v_BKMF: torch.Tensor, attention: Attention, plan: SequencePlan
) -> torch.Tensor:
    """Return the output [B, H, L, F] of this rank's queries, attending to the keys and values of all ranks.

    Dropout and biases with a gradient are computed by `universal`, and by `ulysses`, whatever else is asked for.

    Memory: gather and universal all keys and values, gather_once until the backward; ring three shards of them; ulysses
        what one rank has, of all positions and a part of the heads.
    Collectives: gather one all-gather, backward a reduce-scatter and, but for gather_once, one more all-gather; ring
        degree - 1 messages, backward 2 degree - 1; ulysses four all-to-alls, backward as many; usp both, over its two
        groups; universal two all-gathers, backward two reduce-scatters.

    Args:
        q_BHLE: Queries of this rank.
        k_BKME: Keys of this rank.
        v_BKMF: Values of this rank.
        attention: What is computed.
        plan: How.
    """
    q, k, v = _autocast(q_BHLE, k_BKME, v_BKMF)
    group, method = plan.group, plan.method
    if method is Method.ULYSSES or (method is Method.USP and not attention.needs_autograd):
        return _exchanged(q, k, v, attention, plan)
    if method is Method.UNIVERSAL or attention.needs_autograd:
        k, v = (gather_sequence(x, dim=2, positions=plan.columns, group=group.name) for x in (k, v))
        return local_attention(q, k, v, attention, rows=plan.rows, columns=plan.whole, rank=group.rank)
    return block_attention(
        q, k, v, _four_dims(attention.mask), rows=plan.rows, columns=plan.columns, rank=group.rank,
        pattern=attention.pattern, scale=_scale(attention, q), softcap=attention.softcap,
        way=WAYS.get(method, "gather"), group=group.name,
    )  # fmt: skip


def local_attention(
    q_BHLE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTF: torch.Tensor, attention: Attention,
    *, rows: Positions, columns: Positions, rank: int,
) -> torch.Tensor:  # fmt: skip
    """Return the output [B, H, L, F] of this rank's queries, where all keys and values are here in order of positions.

    Where they are the same on all ranks (an encoder that was not sharded), their gradients are this rank's part.
    Collectives: none.

    Args:
        q_BHLE: Queries of this rank.
        k_BKTE: All keys.
        v_BKTF: All values.
        attention: What is computed.
        rows: Positions of queries by rank.
        columns: `Positions.whole(T)`.
        rank: This rank's place in `rows`.
    """
    q, k, v = _autocast(q_BHLE, k_BKTE, v_BKTF)
    mask, scale = _four_dims(attention.mask), _scale(attention, q)
    if not attention.needs_autograd:
        return block_attention(
            q, k, v, mask, rows=rows, columns=columns, rank=rank, pattern=attention.pattern, scale=scale,
            softcap=attention.softcap,
        )  # fmt: skip
    index = rows.index(rank).to(q.device)
    if mask is not None and mask.shape[2] == rows.length and rows.degree > 1:
        mask = mask.index_select(2, index)
    seen = attention.pattern.mask(index, torch.arange(k.shape[2], device=q.device))
    if seen is not None:
        mask = seen if mask is None else mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
    if attention.softcap:
        return _written_out(q, k, v, mask, scale=scale, softcap=attention.softcap, dropout=attention.dropout)
    return attend_drawing(q, k, v, mask, attention.dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _exchanged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention, plan: SequencePlan
) -> torch.Tensor:
    """Exchange positions for heads within groups of neighbouring ranks, attend, and exchange back."""
    group, num_heads, (of_rows, of_columns) = plan.group, q.shape[1], plan.exchanged
    is_ring, degree = plan.method is Method.USP, of_rows.degree
    name, scale = group.inner if is_ring else group.name, _scale(attention, q)
    if (repeats := head_repeats(num_heads, k.shape[1], degree)) > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    q = exchange_heads(q, positions=of_rows, group=name, to_heads=True)
    k, v = (exchange_heads(x, positions=of_columns, group=name, to_heads=True) for x in (k, v))
    mask = _all_rows(_four_dims(attention.mask), plan)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.narrow(1, group.rank % degree * (num_heads // degree), num_heads // degree)
    rows, columns = plan.grouped
    if is_ring:
        o = block_attention(
            q, k, v, mask, rows=rows, columns=columns, rank=group.rank // degree, pattern=attention.pattern,
            scale=scale, softcap=attention.softcap, way="ring", group=group.outer,
        )  # fmt: skip
    else:
        own = replace(attention, mask=mask, scale=scale)
        with attention.of_heads(index=group.rank, degree=degree, size=num_heads):
            o = local_attention(q, k, v, own, rows=rows, columns=columns, rank=0)
    return exchange_heads(o, positions=of_rows, group=name, to_heads=False)


def _all_rows(mask: torch.Tensor | None, plan: SequencePlan) -> torch.Tensor | None:
    """Return a mask with the rows of the whole sequence: with heads exchanged, this rank has queries of other ranks."""
    if mask is None or mask.shape[2] in (1, plan.rows.length):
        return mask
    own = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
    return gather_sequence(own, dim=2, positions=plan.rows, group=plan.group.name).to(mask.dtype)


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    *, scale: float, softcap: float, dropout: float,
) -> torch.Tensor:  # fmt: skip
    num_groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(num_groups, 1) for x in (k, v))
    scores_BHLT = torch.tanh(q @ k.transpose(-1, -2) * scale / softcap) * softcap
    if mask is not None:
        scores_BHLT = scores_BHLT.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores_BHLT + mask
    weights = scores_BHLT.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, dropout) @ v


def _scale(attention: Attention, q: torch.Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1]) if attention.scale is None else attention.scale


def _four_dims(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask if mask is None or mask.dim() == 4 else mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tensors in autocast's dtype, as `scaled_dot_product_attention` takes them."""
    kind = tensors[0].device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(dtype) if x.dtype != torch.float64 else x for x in tensors)
    else:
        q, k, v = tensors
    return q, k, v
