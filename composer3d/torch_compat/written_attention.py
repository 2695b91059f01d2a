"""Attention that drops weights, written out: torch's operator that is told which are kept is private, and warns.

Shapes: B batch, of any number of dims, H heads, K heads of keys and values, L queries, T keys, E head dim, F of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attend_keeping", "attends_by_math"]


def attends_by_math(query: Tensor, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether `scaled_dot_product_attention` takes torch's math path, whose dropout is a function of its own.

    On CPU every call that drops weights does. torch's choice is a private function (torch 2.11-2.15).

    Args:
        query: Of the call.
        args: Of the call, all of them.
        options: Likewise.
    """
    import torch

    return query.device.type == "cpu" or torch._fused_sdp_choice(*args, **options) == 0


def attend_keeping(
    q_BHLE: Tensor,
    k_BKTE: Tensor,
    v_BKTF: Tensor,
    mask: Tensor | None,
    kept_BHLT: Tensor,
    *,
    dropout_p: float,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what `scaled_dot_product_attention` does by torch's math path, of weights that were drawn before.

    Memory: of every weight 2 numbers for the backward, and a byte.

    Args:
        q_BHLE: Queries.
        k_BKTE: Keys.
        v_BKTF: Values.
        mask: bool, True where a key is visible, or additive.
        kept_BHLT: bool, True where a weight is kept.
        dropout_p: Probability with which weights were dropped.
        is_causal: As of torch's function, and so the next two.
        scale: As above.
        enable_gqa: As above.
    """
    import torch

    kind, (q, k, v) = q_BHLE.device.type, (q_BHLE, k_BKTE, v_BKTF)
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(narrow) if x.dtype != torch.float64 else x for x in (q, k, v))
    dtype = q.dtype
    with torch.autocast(kind, enabled=False):
        # As torch does: products of 16-bit numbers are too coarse for what a softmax makes of them.
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores_BHLT = (q * factor) @ k.transpose(-2, -1)
        if is_causal:
            mask = torch.ones(scores_BHLT.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            scores_BHLT = scores_BHLT.masked_fill(~mask, -math.inf) if is_bool else scores_BHLT + mask
        # 0 where all scores are -inf; private (torch 2.11-2.15).
        weights_BHLT = torch._safe_softmax(scores_BHLT, -1)
        return ((weights_BHLT * kept_BHLT) @ (v * (1 / (1 - dropout_p)))).to(dtype)
