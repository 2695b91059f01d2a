"""Decoder blocks with the habits of many code bases, each inside one plain language model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 12


class RMSNorm(nn.Module):
    """As most code bases write it themselves."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Model(nn.Module):
    def __init__(self, block, dim=16, num_layers=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(block(dim) for _ in range(num_layers))
        self.norm, self.out = RMSNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


class GroupedNormed(nn.Module):
    """Fused key and value, norms a head, rotated halves, repeated key-value heads, fused gate and up."""

    def __init__(self, dim, heads=4, kv_heads=2):
        super().__init__()
        self.H, self.K, self.E = heads, kv_heads, dim // heads
        self.n1, self.n2 = RMSNorm(dim), RMSNorm(dim)
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * kv_heads * self.E), nn.Linear(dim, dim)
        self.qn, self.kn = RMSNorm(self.E), RMSNorm(self.E)
        self.gate_up, self.down = nn.Linear(dim, 64), nn.Linear(32, dim)

    def forward(self, x):
        B, S, D = x.shape
        h = self.n1(x)
        q = self.qn(self.q(h).view(B, S, self.H, self.E)).transpose(1, 2)
        k, v = self.kv(h).view(B, S, 2, self.K, self.E).unbind(2)
        k, v = self.kn(k).transpose(1, 2), v.transpose(1, 2)
        first, second = k.chunk(2, -1)
        k = torch.cat((-second, first), -1)
        k = k[:, :, None].expand(B, self.K, self.H // self.K, S, self.E).reshape(B, self.H, S, self.E)
        v = v.repeat_interleave(self.H // self.K, dim=1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, -1)
        x = x + self.o(o)
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Parallel(nn.Module):
    """Attention and feed-forward beside each other, out of one projection, taken apart twice."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.H, self.norm = heads, nn.LayerNorm(dim)
        self.fused, self.attention_out, self.ff_out = (
            nn.Linear(dim, 7 * dim),
            nn.Linear(dim, dim),
            nn.Linear(4 * dim, dim),
        )

    def forward(self, x):
        B, S, D = x.shape
        qkv, ff = self.fused(self.norm(x)).split([3 * D, 4 * D], dim=-1)
        q, k, v = (t.view(B, S, self.H, D // self.H).permute(0, 2, 1, 3) for t in qkv.split(D, -1))
        a = torch.softmax((q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1)), -1) @ v
        return x + self.attention_out(a.transpose(1, 2).contiguous().view(B, S, D)) + self.ff_out(F.gelu(ff))


class Joined(nn.Module):
    """One projection contracts attention and feed-forward together."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.H, self.norm = heads, nn.LayerNorm(dim)
        self.q, self.k, self.v, self.up = (nn.Linear(dim, size) for size in (dim, dim, dim, 2 * dim))
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x):
        B, S, D = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(B, S, self.H, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(torch.cat([a, F.relu(self.up(h), inplace=True)], -1))


class Interleaved(nn.Module):
    """Query, key and value next to each other within each head."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.H, self.E, self.norm = heads, dim // heads, nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.m = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(inplace=True), nn.Linear(4 * dim, dim))

    def forward(self, x):
        qkv = self.qkv(self.norm(x))
        qkv = qkv.view(*qkv.size()[:-1], self.H, 3 * self.E)
        q, k, v = (qkv[..., at * self.E : (at + 1) * self.E].permute(0, 2, 1, 3) for at in range(3))
        o = F.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3).contiguous()
        x = x + self.o(o.view(o.size(0), o.size(1), self.H * self.E))
        return x + self.m(x)


class Einsum(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.H = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).reshape(b, n, self.H, d // self.H) for f in (self.q, self.k, self.v))
        mask = torch.full((n, n), float("-inf")).triu(1)
        a = F.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * (d // self.H) ** -0.5 + mask, dim=-1)
        return x + self.o(torch.einsum("bhij,bjhd->bihd", a, v).reshape(b, n, d))


class WholeNorm(nn.Module):
    """A norm over all heads together: the query has to stay whole, and the rest does not."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.H, self.qn = heads, nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.H, -1).transpose(1, 2) for t in (self.qn(self.q(x)), self.k(x), self.v(x)))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.glu(self.up(x)))


class HeadBias(nn.Module):
    """A parameter of attention itself is combined with its sharded heads."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.H, self.temperature = heads, nn.Parameter(torch.ones(()))
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.H, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q * self.temperature, k, v).transpose(1, 2).flatten(2))


class Vectors(nn.Sequential):
    """A plain perceptron over feature vectors."""

    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, VOCAB))


class Two(nn.Module):
    """An encoder and a decoder that looks at it: two lists of blocks, so there is no single one."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.encoder = nn.ModuleList(Einsum(dim) for _ in range(2))
        self.decoder = nn.ModuleList(Cross(dim) for _ in range(2))

    def forward(self, tokens):
        memory = x = self.emb(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.out(x)


class Cross(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.H = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, memory):
        b, n, d = x.shape
        q, k, v = (
            t.view(b, -1, self.H, d // self.H).transpose(1, 2) for t in (self.q(x), self.k(memory), self.v(memory))
        )
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


BLOCKS = {
    block.__name__: block for block in (GroupedNormed, Parallel, Joined, Interleaved, Einsum, WholeNorm, HeadBias)
}
MODELS = {name: (lambda block=block: Model(block)) for name, block in BLOCKS.items()} | {"Vectors": Vectors, "Two": Two}
