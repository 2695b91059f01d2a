"""torch's attention kernels that return the log-sum-exp of the scores, and their backwards.

All of them are private operators of `aten` (torch 2.11-2.15): the public function returns the output alone, and with
blocks of a sequence the log-sum-exp is what they are joined by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "cpu_flash_attention",
    "cpu_flash_attention_backward",
    "cuda_efficient_attention",
    "cuda_efficient_attention_backward",
    "cuda_flash_attention",
    "cuda_flash_attention_backward",
]


def cpu_flash_attention(
    q_BHLE: Tensor, k_BKME: Tensor, v_BKME: Tensor, *, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output [B, H, L, E] and log-sum-exp [B, H, L]: float64, float32, bfloat16, float16; H a multiple of K.

    Args:
        bias: Added to scores, of q's dtype, broadcastable to [B, H, L, M].
    """
    import torch

    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHLE, k_BKME, v_BKME, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return o, lse


def cpu_flash_attention_backward(
    grad_BHLE: Tensor, inputs: tuple[Tensor, Tensor, Tensor], outputs: tuple[Tensor, Tensor],
    *, bias: Tensor | None, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v.

    Args:
        inputs: q, k, v.
        outputs: Output and log-sum-exp of the whole rows.
    """
    import torch

    d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_BHLE, *inputs, *outputs, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return d_q, d_k, d_v


def cuda_flash_attention(
    q_BHLE: Tensor, k_BKME: Tensor, v_BKME: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp: float16 and bfloat16, head dims a multiple of 8, H a multiple of K."""
    import torch

    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q_BHLE, k_BKME, v_BKME, 0.0, is_causal, False, scale=scale
    )
    return o, lse


def cuda_flash_attention_backward(
    grad_BHLE: Tensor, inputs: tuple[Tensor, Tensor, Tensor], outputs: tuple[Tensor, Tensor],
    *, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v; see `cpu_flash_attention_backward`."""
    import torch

    q, k, _ = inputs
    no_lengths = torch.empty(0, dtype=torch.int32, device=q.device)
    # Of random numbers, read only where there is dropout.
    state, no_offset = (torch.empty(size, dtype=torch.int64, device=q.device) for size in (2, 0))
    d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_BHLE, *inputs, *outputs, no_lengths, no_lengths, q.shape[2], k.shape[2], 0.0, is_causal,
        state, no_offset, scale=scale,
    )  # fmt: skip
    return d_q, d_k, d_v


def cuda_efficient_attention(
    q_BHLE: Tensor, k_BHME: Tensor, v_BHMF: Tensor, *, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp: float32, float16, bfloat16; as many key heads as heads.

    Args:
        bias: Added to scores, [B, H, L, M], its rows a multiple of 16 elements apart.
    """
    import torch

    o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BHLE, k_BHME, v_BHMF, bias, True, 0.0, is_causal, scale=scale
    )
    return o, lse.narrow(-1, 0, q_BHLE.shape[2])  # it is padded to a multiple of 32 rows


def cuda_efficient_attention_backward(
    grad_BHLF: Tensor, inputs: tuple[Tensor, Tensor, Tensor], outputs: tuple[Tensor, Tensor],
    *, bias: Tensor | None, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v; see `cpu_flash_attention_backward`."""
    import torch

    o, lse = outputs
    padded = torch.nn.functional.pad(lse.float(), (0, -lse.shape[-1] % 32), value=float("inf"))
    state = torch.zeros((), dtype=torch.int64, device=o.device)
    d_q, d_k, d_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_BHLF, *inputs, bias, o, padded, state, state, 0.0, [True, True, True, False], is_causal, scale=scale
    )
    return d_q, d_k, d_v
