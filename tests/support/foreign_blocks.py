"""Blocks with habits: sizes written out, weights of the block itself, gates, pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.block_habits import RMSNorm


class Sliced(nn.Module):
    """Features taken by numbers that are written out."""

    def __init__(self, dim):
        super().__init__()
        self.inp, self.out = nn.Linear(dim, 48), nn.Linear(16, dim)

    def forward(self, x):
        h = self.inp(x)
        return x + self.out(h[..., :16] * h[..., 16:32].sigmoid() + h[..., 32:48].tanh())


class Uneven(nn.Module):
    """Features indexed through the ranks' local shards."""

    def __init__(self, dim):
        super().__init__()
        self.inp, self.out = nn.Linear(dim, 48), nn.Linear(12, dim)
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        h = self.inp(x)
        x = x + self.out(h[..., 5:17] * h[..., 17:29] + h[..., 36:48])
        return x + self.down(self.up(x).relu())


class Named(nn.Module):
    """Open sizes, other names, a residual inside, dropout as a function with a probability of another name."""

    def __init__(self, dim, chunks=4):
        super().__init__()
        self.n, self.width, self.p_attn = chunks, dim // chunks, 0.0
        self.to_qkv, self.merge = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, dim))

    def forward(self, hidden):
        B, L = hidden.shape[:2]
        q, k, v = (t.view(B, L, -1, self.width).transpose(1, 2) for t in self.to_qkv(hidden).chunk(3, dim=-1))
        w = F.dropout((q @ k.transpose(-2, -1) * self.width**-0.5).softmax(-1), self.p_attn, self.training)
        a = (w @ v + v * 0.5).transpose(1, 2).reshape(B, L, -1)
        hidden = hidden + self.merge(a)
        return hidden + self.ff(hidden)


class EinsumWeights(nn.Module):
    """Projections as parameters of the block itself."""

    def __init__(self, dim, heads=4):
        super().__init__()
        e = dim // heads
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(dim, heads, e) * 0.2) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, e, dim) * 0.2)
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        q, k, v = (torch.einsum("bsd,dhe->bhse", x, w) for w in (self.wq, self.wk, self.wv))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("bhse,hed->bsd", a, self.wo)
        return x + self.down(F.relu(self.up(x)))


class Gated(nn.Module):
    """A gate from the whole activation on sharded features: one number a token, and one a head."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.H = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.token_gate, self.head_gate = nn.Linear(dim, 1), nn.Linear(dim, heads)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.H, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        a = a * torch.sigmoid(self.head_gate(x)).unsqueeze(-1)
        return x + self.o(a.flatten(2) * torch.sigmoid(self.token_gate(x)))


class Scaled(nn.Module):
    """Parameters of the block itself between sharded regions, and inside them."""

    def __init__(self, dim):
        super().__init__()
        self.gamma, self.inner = nn.Parameter(torch.rand(dim)), nn.Parameter(torch.rand(32))
        self.shift = nn.Parameter(torch.rand(()))
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        return x + self.gamma * self.down(F.silu(self.up(x) * self.inner + self.shift))


class Pooled(nn.Module):
    """A norm, a parameter of its own, and the mean over the whole sequence."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.pooled, self.scale = nn.LayerNorm(dim), RMSNorm(dim), nn.Parameter(torch.rand(dim))

    def forward(self, x):
        h = self.norm(x) * self.scale
        return x + h + self.pooled(h.mean(1, keepdim=True))


class Depthwise(nn.Module):
    """Two projections in one, a convolution of each channel, and a weight a channel, as in Mamba."""

    def __init__(self, dim, inner=32):
        super().__init__()
        self.inner = inner
        self.inp, self.out = nn.Linear(dim, 2 * inner), nn.Linear(inner, dim)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.select, self.scale = nn.Linear(inner, 4), nn.Parameter(torch.rand(inner))

    def forward(self, x):
        B, S, _ = x.shape
        h, gate = self.inp(x).chunk(2, dim=-1)
        h = F.silu(self.conv(h.transpose(1, 2))[..., :S]).transpose(1, 2)
        state = self.select(h).softmax(-1)
        h = h * state[..., :1] + h * self.scale[None, None, :]
        return x + self.out(h * F.silu(gate))


class Picked(nn.Module):
    """Attention, and experts that pick their tokens by value."""

    def __init__(self, dim):
        super().__init__()
        self.attention = Scaled(dim)
        self.experts = Experts(dim)

    def forward(self, x):
        x = self.attention(x)
        return x + self.experts(x)


class Experts(nn.Module):
    def __init__(self, dim, num=3):
        super().__init__()
        self.gate = nn.Linear(dim, num)
        self.ups, self.downs = (nn.Parameter(torch.randn(num, dim, dim) * 0.2) for _ in range(2))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            at = torch.nonzero(chosen == number).squeeze(1)
            result = result.index_add(0, at, (flat[at] @ self.ups[number]).relu() @ self.downs[number])
        return (result * weights[:, None]).view_as(x)
