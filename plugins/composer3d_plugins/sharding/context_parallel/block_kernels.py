"""Attention of one block with the log-sum-exp of its scores, and its gradients from the whole sequence's results.

torch's own kernels where they fit: on CPU flash with an additive mask, on CUDA flash without one and the
memory-efficient one with it; explicit scores where none does (soft-capping, float64 on CUDA, wide heads). A
backward of a block needs the output and the log-sum-exp of the *whole* row of scores, not of the block: then the
block's gradients add up to those of the row.

Shape suffixes: B batch, H heads of queries, K heads of keys and values (H is a multiple), G = H / K, L queries, M keys,
E head dim of queries and keys, F head dim of values.

Source: Dao et al., FlashAttention, arXiv:2205.14135, appendix B; Liu et al., Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from composer3d import torch_compat

__all__ = ["BlockCall", "Gradients", "Kernel", "Result", "finite", "kernel_for", "merge_", "positions_of"]

_INFINITY = float("inf")
# CUDA's kernels take heads up to this wide; aligned to so many elements, and masks to twice as many.
_MAX_CUDA_HEAD, _CUDA_ALIGNMENT = 256, 8


@dataclass(frozen=True)
class BlockCall:
    """Arguments that determine the scores of a block, besides its queries and keys.

    Args:
        bias: Added to scores, [B|1, H|1, L, M]; None for none.
        is_causal: Whether query i sees keys 0 to i, L == M; never with a bias.
        scale: Factor of the products of queries and keys.
        softcap: c of c * tanh(score / c); 0 for none.
        hides_rows: Whether a bias may hide all keys from a query.
    """

    bias: torch.Tensor | None
    is_causal: bool
    scale: float
    softcap: float = 0.0
    hides_rows: bool = True


@dataclass(frozen=True)
class Result:
    """Output [B, H, L, F] of a block, and log-sum-exp of its scores [B, H, L], -inf where nothing is visible."""

    o_BHLF: torch.Tensor
    lse_BHL: torch.Tensor


@dataclass(frozen=True)
class Gradients:
    """Gradients of a block's queries [B, H, L, E], keys [B, K, M, E] and values [B, K, M, F]."""

    q_BHLE: torch.Tensor
    k_BKME: torch.Tensor
    v_BKMF: torch.Tensor


class Kernel(Protocol):
    """Attention of one block."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: BlockCall) -> Result:
        """Return the block's output and log-sum-exp."""
        ...

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: Result, call: BlockCall
    ) -> Gradients:
        """Return the block's gradients; `whole` is of the whole rows, its log-sum-exp finite."""
        ...


def kernel_for(q_BHLE: torch.Tensor, v_BKMF: torch.Tensor, *, has_bias: bool, softcap: float) -> Kernel:
    """Return the kernel that fits; fake tensors get the one of their device."""
    if softcap:
        return Plain()
    if q_BHLE.device.type == "cpu":
        return CpuFlash()
    widest = max(q_BHLE.shape[-1], v_BKMF.shape[-1])
    is_16_bit = q_BHLE.dtype in (torch.float16, torch.bfloat16)
    if q_BHLE.device.type == "cuda" and widest <= _MAX_CUDA_HEAD:
        if is_16_bit and not has_bias and _has_flash():
            return CudaFlash()
        if is_16_bit or q_BHLE.dtype == torch.float32:
            return CudaEfficient()
    return Plain()


def _has_flash() -> bool:
    """Return whether CUDA's flash kernel runs; a machine that has no device plans for one that does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


class Plain:
    """Scores written out: [B, H, L, M], in float32 or better; blocks that need it are tiles."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: BlockCall) -> Result:
        """Return the block's output and log-sum-exp."""
        scores_BKGLM, _ = self._scores(q, k, call)
        lse = torch.logsumexp(scores_BKGLM, -1)
        weights = (scores_BKGLM - finite(lse).unsqueeze(-1)).exp()
        o = weights @ v.unsqueeze(2).to(weights.dtype)
        return Result(o.flatten(1, 2).to(q.dtype), lse.flatten(1, 2))

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: Result, call: BlockCall
    ) -> Gradients:
        """Return the block's gradients."""
        scores_BKGLM, slope = self._scores(q, k, call)
        dtype, num_groups = scores_BKGLM.dtype, q.shape[1] // k.shape[1]
        grad, q, o = (x.to(dtype).unflatten(1, (-1, num_groups)) for x in (grad, q, whole.o_BHLF))
        k, v = k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
        weights = (scores_BKGLM - whole.lse_BHL.to(dtype).unflatten(1, (-1, num_groups)).unsqueeze(-1)).exp()
        d_v = weights.transpose(-1, -2) @ grad
        d_scores = weights * (grad @ v.transpose(-1, -2) - (grad * o).sum(-1, keepdim=True))
        d_scores = (d_scores if slope is None else d_scores * slope) * call.scale
        return Gradients((d_scores @ k).flatten(1, 2), (d_scores.transpose(-1, -2) @ q).sum(2), d_v.sum(2))

    def _scores(self, q: torch.Tensor, k: torch.Tensor, call: BlockCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scores [B, K, G, L, M] of G heads a key head, and the slope of soft-capping at each."""
        dtype, num_groups = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
        q_BKGLE = q.to(dtype).unflatten(1, (-1, num_groups))
        scores = q_BKGLE @ k.to(dtype).unsqueeze(2).transpose(-1, -2) * call.scale
        slope = None
        if call.softcap:
            capped = torch.tanh(scores / call.softcap)
            scores, slope = capped * call.softcap, 1 - capped * capped
        if call.is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -_INFINITY)
        if call.bias is not None:
            bias = call.bias.to(dtype)
            heads = bias.unsqueeze(2) if bias.shape[1] == 1 else bias.unflatten(1, (-1, num_groups))
            scores = scores + heads
        return scores, slope


class CpuFlash:
    """torch's flash attention for CPU: any floating dtype, an additive mask, few key heads."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: BlockCall) -> Result:
        """Return the block's output and log-sum-exp."""
        width = max(q.shape[-1], v.shape[-1])
        o, lse = torch_compat.cpu_flash_attention(
            *(_wide(x, width) for x in (q, k, v)), bias=call.bias, is_causal=call.is_causal, scale=call.scale
        )
        return _without_hidden_rows(Result(_narrow(o, v.shape[-1]), lse), call)

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: Result, call: BlockCall
    ) -> Gradients:
        """Return the block's gradients."""
        width = max(q.shape[-1], v.shape[-1])
        grad, o, *inputs = (_wide(x, width) for x in (grad, whole.o_BHLF, q, k, v))
        d_q, d_k, d_v = torch_compat.cpu_flash_attention_backward(
            grad, (inputs[0], inputs[1], inputs[2]), (o, whole.lse_BHL),
            bias=call.bias, is_causal=call.is_causal, scale=call.scale,
        )  # fmt: skip
        return Gradients(_narrow(d_q, q.shape[-1]), _narrow(d_k, k.shape[-1]), _narrow(d_v, v.shape[-1]))


class CudaFlash:
    """torch's flash attention for CUDA: float16 and bfloat16, no mask, few key heads."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: BlockCall) -> Result:
        """Return the block's output and log-sum-exp."""
        width = _aligned(max(q.shape[-1], v.shape[-1]), _CUDA_ALIGNMENT)
        o, lse = torch_compat.cuda_flash_attention(
            *(_wide(x, width) for x in (q, k, v)), is_causal=call.is_causal, scale=call.scale
        )
        return Result(_narrow(o, v.shape[-1]), lse)

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: Result, call: BlockCall
    ) -> Gradients:
        """Return the block's gradients."""
        width = _aligned(max(q.shape[-1], v.shape[-1]), _CUDA_ALIGNMENT)
        grad, o, *inputs = (_wide(x, width) for x in (grad, whole.o_BHLF, q, k, v))
        d_q, d_k, d_v = torch_compat.cuda_flash_attention_backward(
            grad, (inputs[0], inputs[1], inputs[2]), (o, whole.lse_BHL.float()),
            is_causal=call.is_causal, scale=call.scale,
        )  # fmt: skip
        return Gradients(_narrow(d_q, q.shape[-1]), _narrow(d_k, k.shape[-1]), _narrow(d_v, v.shape[-1]))


class CudaEfficient:
    """torch's memory-efficient attention for CUDA: float32, float16, bfloat16, with an additive mask.

    It has no groups of heads, so keys and values are repeated for the block.
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: BlockCall) -> Result:
        """Return the block's output and log-sum-exp."""
        o, lse = torch_compat.cuda_efficient_attention(
            *self._inputs(q, k, v), bias=self._bias(call, q, k), is_causal=call.is_causal, scale=call.scale
        )
        return _without_hidden_rows(Result(_narrow(o, v.shape[-1]), lse), call)

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: Result, call: BlockCall
    ) -> Gradients:
        """Return the block's gradients."""
        num_groups, width = q.shape[1] // k.shape[1], _aligned(v.shape[-1], _CUDA_ALIGNMENT)
        d_q, d_k, d_v = torch_compat.cuda_efficient_attention_backward(
            _wide(grad, width), self._inputs(q, k, v), (_wide(whole.o_BHLF, width), whole.lse_BHL),
            bias=self._bias(call, q, k), is_causal=call.is_causal, scale=call.scale,
        )  # fmt: skip
        d_k, d_v = (x.unflatten(1, (-1, num_groups)).sum(2) if num_groups > 1 else x for x in (d_k, d_v))
        return Gradients(_narrow(d_q, q.shape[-1]), _narrow(d_k, k.shape[-1]), _narrow(d_v, v.shape[-1]))

    def _inputs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(num_groups, 1) if num_groups > 1 else x for x in (k, v))
        q, k, v = (_wide(x, _aligned(x.shape[-1], _CUDA_ALIGNMENT)) for x in (q, k, v))
        return q, k, v

    def _bias(self, call: BlockCall, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
        if call.bias is None:
            return None
        length = call.bias.shape[-1]
        padded = F.pad(call.bias, (0, _aligned(length, 2 * _CUDA_ALIGNMENT) - length))
        return _narrow(padded, length).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def merge_(whole: Result, block: Result, rows: tuple[int, int], *, is_first: bool) -> None:
    """Add a block to the results so far of its rows, in place; both are softmaxes over their own keys.

    Args:
        whole: Results so far, in float32 or better.
        block: Of one block.
        rows: Where its queries lie.
        is_first: Whether there is nothing of these rows so far.
    """
    o, lse = (positions_of(x, rows) for x in (whole.o_BHLF, whole.lse_BHL))
    if is_first:
        o.copy_(block.o_BHLF)
        lse.copy_(block.lse_BHL)
        return
    lse_block = block.lse_BHL.to(lse.dtype)
    merged = torch.logaddexp(lse, lse_block)
    shift = finite(merged)
    o.mul_((lse - shift).exp_().unsqueeze(-1)).add_((lse_block - shift).exp_().unsqueeze(-1) * block.o_BHLF)
    lse.copy_(merged)


def positions_of(tensor: torch.Tensor, run: tuple[int, int]) -> torch.Tensor:
    """Return a run of the positions of [B, H, L, ...], a view; fake tensors of absent devices cannot be indexed."""
    start, end = run
    return tensor if not start and end == tensor.shape[2] else tensor.narrow(2, start, end - start)


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Return log-sum-exps with 0 for those of rows that see nothing, so that no difference is -inf - -inf."""
    return lse.masked_fill(lse == -_INFINITY, 0.0)


def _without_hidden_rows(result: Result, call: BlockCall) -> Result:
    """Return results with 0 and -inf in rows that see nothing, whatever the kernel left there."""
    if call.bias is None or not call.hides_rows:
        return result
    hidden = (call.bias == -_INFINITY).all(-1)
    return Result(result.o_BHLF.masked_fill(hidden.unsqueeze(-1), 0.0), result.lse_BHL.masked_fill(hidden, -_INFINITY))


def _wide(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return a tensor with zeros up to a head dim; scores and gradients are the same with them."""
    missing = width - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _narrow(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return tensor if tensor.shape[-1] == width else tensor.narrow(-1, 0, width)


def _aligned(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit
