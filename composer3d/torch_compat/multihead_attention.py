"""torch's `multi_head_attention_forward` written out, so that each function in it is propagated.

Shapes: B batch, S queries, T keys, D model dim, E head dim, H heads; the function takes x_SBD.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["NAME", "attend_with_heads", "call_of"]

NAME = "multi_head_attention_forward"


def call_of(args: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a call's arguments by name; None for one that adds keys of its own, which has no written form."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **options)
    bound.apply_defaults()
    given = bound.arguments
    if given["add_zero_attn"] or any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v")):
        return None
    return given


def attend_with_heads(given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return what torch's function does: the output, and the weights if they are needed.

    Args:
        given: As of `call_of`.
    """
    is_batched = given["query"].dim() == 3
    inputs = [given[name] if is_batched else given[name].unsqueeze(1) for name in ("query", "key", "value")]
    q_BHSE, k_BHTE, v_BHTE = (
        F.linear(x_SBD, weight, bias).unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3)
        for x_SBD, weight, bias in zip(inputs, _weights(given), _biases(given), strict=True)
    )
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if given["need_weights"]:
        scores = (q_BHSE / math.sqrt(q_BHSE.shape[-1])) @ k_BHTE.transpose(-2, -1)
        mask = _mask(given, q_BHSE)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        out_BHSE = weights @ v_BHTE
        weights = weights.mean(1) if given["average_attn_weights"] else weights
        weights = weights if is_batched else weights.squeeze(0)
    else:
        is_causal = given["is_causal"] and given["key_padding_mask"] is None
        mask = None if is_causal else _mask(given, q_BHSE)
        out_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BHTE, v_BHTE, mask, dropout, is_causal)
    out_SBD = F.linear(out_BHSE.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    return out_SBD if is_batched else out_SBD.squeeze(1), weights


def _weights(given: Mapping[str, Any]) -> Sequence[Tensor]:
    if given["use_separate_proj_weight"]:
        return [given[f"{name}_proj_weight"] for name in "qkv"]
    weights: Sequence[Tensor] = given["in_proj_weight"].chunk(3)
    return weights


def _biases(given: Mapping[str, Any]) -> Sequence[Tensor | None]:
    bias = given["in_proj_bias"]
    return (None, None, None) if bias is None else bias.chunk(3)


def _mask(given: Mapping[str, Any], q_BHSE: Tensor) -> Tensor | None:
    """Return what is added to scores_BHST, of shape [B or 1, H or 1, S or 1, T]."""
    masks = []
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is not None:
        mask = mask.unflatten(0, (-1, given["num_heads"])) if mask.dim() == 3 else mask.unsqueeze(0).unsqueeze(0)
        masks.append(_added(mask, q_BHSE.dtype))
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
        masks.append(_added(padding, q_BHSE.dtype).unsqueeze(1).unsqueeze(1))
    return sum(masks[1:], masks[0]) if masks else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask: True in torch's boolean masks here means masked out."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
