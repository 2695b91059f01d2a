"""FlexAttention over a sharded sequence: the user's score and mask functions receive positions in the full sequence.

Shape suffixes as in `sequence_attention`.

Source: Dong et al., Flex Attention, arXiv:2412.05496.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from composer3d_plugins.sharding.context_parallel.attention_methods import Method
from composer3d_plugins.sharding.context_parallel.sequence_attention import Attention, SequencePlan, attend
from composer3d_plugins.sharding.context_parallel.sequence_operators import gather_sequence

__all__ = ["attend_flexibly"]

ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_flexibly(
    q_BHLE: torch.Tensor, k_BKME: torch.Tensor, v_BKMF: torch.Tensor, plan: SequencePlan,
    *, score_mod: ScoreMod | None = None, block_mask: Any = None, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what `flex_attention` of the whole sequence returns for this rank's queries, [B, H, L, F].

    Without `score_mod` the mask function is evaluated for the rank's rows, and any method computes the rest. With it
    keys and values are gathered: on CUDA `flex_attention` runs on the rank's rows; elsewhere scores are written out,
    since torch's function has no backward there.

    Memory: a mask of bools [B|1, H|1, L, T]; scores [B, H, L, T] where they are written out.
    Collectives: those of the plan's method, with `score_mod` those of `universal`.

    Args:
        q_BHLE: Queries of this rank.
        k_BKME: Keys of this rank.
        v_BKMF: Values of this rank.
        plan: How.
        score_mod: Takes a score, its sample, its head, and the positions of its query and key in the whole sequence.
        block_mask: torch's, of the whole sequence.
        scale: Factor of scores; default 1 / sqrt(E).
    """
    if score_mod is None:
        mask = None
        if block_mask is not None:
            # Where heads are exchanged this rank has the queries of others too.
            has_all = plan.method in (Method.ULYSSES, Method.USP)
            rows = torch.arange(plan.rows.length) if has_all else plan.rows.index(plan.group.rank)
            mask = _visible(block_mask, rows.to(q_BHLE.device), plan)
        return attend(q_BHLE, k_BKME, v_BKMF, Attention(mask=mask, scale=scale), plan)
    k, v = (gather_sequence(x, dim=2, positions=plan.columns, group=plan.group.name) for x in (k_BKME, v_BKMF))
    index = plan.rows.index(plan.group.rank).to(q_BHLE.device)

    def moved(score: torch.Tensor, b: Any, h: Any, row: Any, column: Any) -> torch.Tensor:
        return score_mod(score, b, h, index[row], column)

    if q_BHLE.device.type == "cuda":
        return _by_torch(q_BHLE, k, v, moved, block_mask, plan, scale)
    mask = None if block_mask is None else _visible(block_mask, index, plan)
    return _written_out(q_BHLE, k, v, score_mod, mask, index, scale)


def _mask_function(block_mask: Any, index: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the mask function of rows of a shard: the user's, and which blocks of the whole mask there are.

    Args:
        block_mask: torch's.
        index: Position of each row.
    """
    blocks = block_mask.to_dense().bool()
    num_rows, num_columns = block_mask.BLOCK_SIZE

    def visible(b: Any, h: Any, row: Any, column: Any) -> torch.Tensor:
        at = index[row]
        b_block, h_block = (0 if blocks.shape[dim] == 1 else place for dim, place in ((0, b), (1, h)))
        listed = blocks[b_block, h_block, at // num_rows, column // num_columns]
        seen: torch.Tensor = listed & block_mask.mask_mod(b, h, at, column)
        return seen

    return visible


def _visible(block_mask: Any, index: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
    """Return a mask's rows at some positions, bool [B|1, H|1, L, T]."""
    batch, heads = block_mask.shape[:2]
    functions = _over_all(_mask_function(block_mask, index), num_scores=0)
    places = (torch.arange(size, device=index.device) for size in (batch, heads, len(index), plan.columns.length))
    mask: torch.Tensor = functions(*places)
    return mask.expand(batch, heads, len(index), plan.columns.length)


def _over_all(function: Callable[..., torch.Tensor], *, num_scores: int) -> Callable[..., torch.Tensor]:
    """Return a function of one score, or of none, for all samples, heads, queries and keys."""
    score: tuple[int | None, ...] = (0,) * num_scores
    for place in (3, 2, 1, 0):
        dims = tuple(0 if at == place else None for at in range(4))
        function = torch.vmap(function, in_dims=(*score, *dims), out_dims=0)
    return function


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: ScoreMod, block_mask: Any, plan: SequencePlan,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mine = None
    if block_mask is not None:
        index = plan.rows.index(plan.group.rank).to(q.device)
        batch, heads = (None if size == 1 else size for size in block_mask.shape[:2])
        mine = create_block_mask(
            _mask_function(block_mask, index), batch, heads, q.shape[2], k.shape[2], device=q.device,
            BLOCK_SIZE=block_mask.BLOCK_SIZE,
        )  # fmt: skip
    result: Any = flex_attention(
        q, k, v, score_mod=score_mod, block_mask=mine, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    found: torch.Tensor = result
    return found


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: ScoreMod, mask: torch.Tensor | None,
    index: torch.Tensor, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores_BHLT = (q @ k.transpose(-1, -2)).to(dtype) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    places = [torch.arange(size, device=q.device) for size in (*q.shape[:2], q.shape[2], k.shape[2])]
    places[2] = index
    scores_BHLT = _over_all(score_mod, num_scores=1)(scores_BHLT, *places).to(dtype)
    if mask is not None:
        scores_BHLT = scores_BHLT.masked_fill(~mask, -math.inf)
    # Rows that see nothing are 0, as torch's function has them.
    least = scores_BHLT.detach().amax(-1, keepdim=True)
    weights = (scores_BHLT - least.masked_fill(least == -math.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total.masked_fill(total == 0, 1.0)).to(v.dtype) @ v
