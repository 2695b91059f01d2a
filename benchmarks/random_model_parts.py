"""Parts of models as people write them, of which `random_models.py` puts models together.

Each table is one choice of a model's author: how positions are mixed, what each computes. All of them are plain torch,
with no random number in a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

__all__ = ["DIM", "LENGTH", "MIXERS", "MLPS", "VOCAB", "CrossAttention"]

DIM, LENGTH, VOCAB = 16, 8, 12
NUM_HEADS = 4
WIDTH = DIM // NUM_HEADS


def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, device=device, dtype=torch.bool).tril()


def _heads(x_BSD: Tensor, num_heads: int = NUM_HEADS) -> Tensor:
    return x_BSD.view(*x_BSD.shape[:2], num_heads, -1).transpose(1, 2)


# ---- what mixes positions --------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Three projections and torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (_heads(f(x_BSD)) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MaskedAttention(nn.Module):
    """One fused projection, softmax by hand, the mask a buffer as in minGPT."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.register_buffer("mask", torch.ones(16, 16).tril().view(1, 1, 16, 16))

    def forward(self, x_BSD: Tensor) -> Tensor:
        B, S, D = x_BSD.size()
        parts = self.c_attn(x_BSD).split(D, dim=2)
        q, k, v = (each.view(B, S, NUM_HEADS, D // NUM_HEADS).transpose(1, 2) for each in parts)
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.mask[:, :, :S, :S] == 0, float("-inf"))
        return self.c_proj((weights.softmax(-1) @ v).transpose(1, 2).contiguous().view(B, S, D))


class UnboundAttention(nn.Module):
    """A fused projection unbound as in timm, an additive mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x_BSD: Tensor) -> Tensor:
        B, S, D = x_BSD.shape
        q, k, v = self.qkv(x_BSD).reshape(B, S, 3, NUM_HEADS, D // NUM_HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        bias = torch.zeros(S, S, dtype=q.dtype, device=q.device).masked_fill(~_causal(S, q.device), -torch.inf)
        return self.proj((torch.softmax(q @ k.mT * WIDTH**-0.5 + bias, -1) @ v).transpose(1, 2).reshape(B, S, D))


class GroupedAttention(nn.Module):
    """Fewer heads of keys and values, rotary positions, queries and keys normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.wk, self.wv = nn.Linear(DIM, DIM // 2, bias=False), nn.Linear(DIM, DIM // 2, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k = self.q_norm(_heads(self.wq(x_BSD))), self.k_norm(_heads(self.wk(x_BSD), NUM_HEADS // 2))
        v, S = _heads(self.wv(x_BSD), NUM_HEADS // 2), x_BSD.shape[1]
        angles = torch.arange(S, device=q.device).unsqueeze(1) * torch.tensor([1.0, 0.1], device=q.device)
        sin, cos = angles.sin().repeat(1, 2).to(q.dtype), angles.cos().repeat(1, 2).to(q.dtype)
        q, k = (each * cos + torch.cat((-each[..., 2:], each[..., :2]), -1) * sin for each in (q, k))
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MultiQueryAttention(nn.Module):
    """One head of keys and values, biases of distances (ALiBi)."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.to_out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * WIDTH), nn.Linear(DIM, DIM)

    def forward(self, x_BSD: Tensor) -> Tensor:
        S, (k, v) = x_BSD.shape[1], self.to_kv(x_BSD).chunk(2, dim=-1)
        distance = torch.arange(S, device=x_BSD.device)
        slopes = 2.0 ** -torch.arange(1, NUM_HEADS + 1, device=x_BSD.device).to(x_BSD.dtype)
        bias = slopes.view(-1, 1, 1) * (distance.view(1, -1) - distance.view(-1, 1)).to(x_BSD.dtype)
        scores = torch.einsum("bhsd,btd->bhst", _heads(self.to_q(x_BSD)), k) * WIDTH**-0.5 + bias
        weights = scores.masked_fill(~_causal(S, x_BSD.device), torch.finfo(scores.dtype).min).softmax(-1)
        return self.to_out(torch.einsum("bhst,btd->bshd", weights, v).flatten(2))


class EinsumAttention(nn.Module):
    """Parameters with einsum in place of linear layers, as in JAX."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, DIM, NUM_HEADS, WIDTH) * DIM**-0.5)
        self.out = nn.Parameter(torch.randn(NUM_HEADS, WIDTH, DIM) * DIM**-0.5)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = torch.einsum("bsd,cdhk->cbhsk", x_BSD, self.qkv)
        mask = _causal(x_BSD.shape[1], x_BSD.device)
        return torch.einsum("bhsk,hkd->bsd", F.scaled_dot_product_attention(q, k, v, attn_mask=mask), self.out)


class TorchAttention(nn.Module):
    """nn.MultiheadAttention with a float mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(DIM, NUM_HEADS, batch_first=True)

    def forward(self, x_BSD: Tensor) -> Tensor:
        S = x_BSD.shape[1]
        mask = torch.full((S, S), float("-inf"), dtype=x_BSD.dtype, device=x_BSD.device).triu(1)
        return self.attn(x_BSD, x_BSD, x_BSD, attn_mask=mask, need_weights=False)[0]


class CausalConv(nn.Module):
    """A depthwise convolution, padded on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(DIM, DIM, 3, groups=DIM), nn.Linear(DIM, DIM)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.out(F.silu(self.conv(F.pad(x_BSD.transpose(1, 2), (2, 0)))).transpose(1, 2))


class RunningMean(nn.Module):
    """The mean of all positions before, gated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x_BSD: Tensor) -> Tensor:
        counts = torch.arange(1, x_BSD.shape[1] + 1, device=x_BSD.device, dtype=x_BSD.dtype)
        return self.value(x_BSD).cumsum(1) / counts[None, :, None] * self.gate(x_BSD).sigmoid()


class TokenMixing(nn.Module):
    """A linear layer over positions, as in MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(LENGTH, 12), nn.Linear(12, LENGTH)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BSD.transpose(1, 2)))).transpose(1, 2)


class Recurrent(nn.Module):
    """torch's GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.rnn(x_BSD)[0]


class LinearAttention(nn.Module):
    """Sums of outer products instead of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (_heads(each) for each in self.to_qkv(x_BSD).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2)
        norm = torch.einsum("bhsd,bhsd->bhs", q, k.cumsum(2)).clamp(min=1e-6)
        out = torch.einsum("bhsd,bhsde->bhse", q, state) / norm.unsqueeze(-1)
        return self.to_out(out.transpose(1, 2).reshape(x_BSD.shape))


class CrossAttention(nn.Module):
    """Attention to a memory, keys and values in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.to_out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x_BSD: Tensor, memory_BTD: Tensor) -> Tensor:
        k, v = (_heads(each) for each in self.to_kv(memory_BTD).chunk(2, dim=-1))
        mixed = F.scaled_dot_product_attention(_heads(self.to_q(x_BSD)), k, v)
        return self.to_out(mixed.transpose(1, 2).flatten(2))


MIXERS: Mapping[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "masked attention": MaskedAttention,
    "unbound attention": UnboundAttention,
    "grouped attention": GroupedAttention,
    "multi-query attention": MultiQueryAttention,
    "einsum attention": EinsumAttention,
    "torch attention": TorchAttention,
    "causal convolution": CausalConv,
    "running mean": RunningMean,
    "token mixing": TokenMixing,
    "recurrent": Recurrent,
    "linear attention": LinearAttention,
}


# ---- what each position computes -------------------------------------------------------------------------------------


class Gated(nn.Module):
    """SwiGLU of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(DIM, 24), nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class FusedGated(nn.Module):
    """SwiGLU with gate and values in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(DIM, 48, bias=False), nn.Linear(24, DIM, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BSD).chunk(2, -1)
        return self.down(F.gelu(gate) * up)


class Pointwise(nn.Module):
    """Convolutions of one position, on transposed activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(DIM, 32, 1), nn.Conv1d(32, DIM, 1)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.conv2(F.relu(self.conv1(x_BSD.permute(0, 2, 1)))).permute(0, 2, 1)


class Multiplied(nn.Module):
    """Parameters that the forward multiplies by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(DIM, 32) / 4), nn.Parameter(torch.randn(32, DIM) / 6)
        self.b = nn.Parameter(torch.zeros(32))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return torch.matmul(F.relu(x_BSD @ self.w_in + self.b).square(), self.w_out)


class Experts(nn.Module):
    """Two experts, both computed, mixed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 12), nn.SiLU(), nn.Linear(12, DIM)) for _ in range(2))

    def forward(self, x_BSD: Tensor) -> Tensor:
        weights = self.router(x_BSD).softmax(-1)
        return torch.stack([expert(x_BSD) for expert in self.experts], -1).mul(weights.unsqueeze(-2)).sum(-1)


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))


def _sloped() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 32), nn.PReLU(), nn.Linear(32, DIM, bias=False))


def _low_rank() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4, bias=False), nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, DIM))


def _weight_norm() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(DIM, 32)), nn.ReLU(), weight_norm(nn.Linear(32, DIM)))


def _normed_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 32), nn.LayerNorm(32), nn.Hardswish(), nn.Linear(32, DIM))


MLPS: Mapping[str, Callable[[], nn.Module]] = {
    "sequential": _sequential,
    "gated": Gated,
    "fused gate": FusedGated,
    "pointwise convolutions": Pointwise,
    "multiplied parameters": Multiplied,
    "two experts": Experts,
    "PReLU": _sloped,
    "low rank": _low_rank,
    "weight norm": _weight_norm,
    "a norm inside": _normed_inside,
}
