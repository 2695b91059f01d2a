"""Attention as somebody might bring it: keys shared over heads, latent keys, biases a head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from support.block_habits import RMSNorm


class GPTJ(nn.Module):
    """Attention and feed-forward beside each other, fused per head, with rotated halves."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.num_attention_heads, self.head_size = heads, dim // heads
        self.input_layernorm = nn.LayerNorm(dim)
        self.query_key_value, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        h = self.input_layernorm(x)
        qkv = self.query_key_value(h)
        qkv = qkv.view(qkv.size()[:-1] + (self.num_attention_heads, 3 * self.head_size)).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        at = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / torch.tensor([1.0, 7.0], dtype=x.dtype).repeat(2)
        turn = lambda t: t * at.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * at.sin()  # noqa: E731
        a = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        a = self.dense(a.transpose(1, 2).flatten(2))
        return x + a + self.down(F.gelu(self.up(h)))


class MultiQuery(nn.Module):
    """One key-value head for all."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.ln, self.q, self.kv = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, 2 * dim // heads)
        self.o, self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        B, S, _ = x.shape
        h = self.ln(x)
        q = self.q(h).view(B, S, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = self.kv(h).split(self.head_dim, -1)
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        w = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).softmax(-1)
        x = x + self.o((w @ v).transpose(1, 2).reshape(B, S, -1))
        return x + self.down(F.gelu(self.up(x)))


class MultiQueryExpanded(MultiQuery):
    """The same, the head repeated by the number of heads."""

    def forward(self, x):
        B, S, _ = x.shape
        h = self.ln(x)
        q = self.q(h).view(B, S, -1, self.head_dim).transpose(1, 2)
        k, v = self.kv(h).chunk(2, -1)
        k, v = (t[:, None].expand(B, self.num_heads, S, self.head_dim) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).contiguous().view(B, S, -1))
        return x + self.down(F.gelu(self.up(x)))


class MultiQueryRepeated(nn.Module):
    """One key-value head, repeated for two query heads: over two ranks, each head is all that a rank has of its dim."""

    def __init__(self, dim, heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, 1, dim // heads
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, dim // heads, bias=False) for _ in range(2))

    def forward(self, x):
        B, S, _ = x.shape
        q = self.q(x).view(B, S, self.num_heads, -1).transpose(1, 2)
        k, v = (
            f(x).view(B, S, self.num_kv_heads, -1).transpose(1, 2).repeat_interleave(self.num_heads, 1)
            for f in (self.k, self.v)
        )
        w = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).softmax(-1)
        return x + self.o((w @ v).transpose(1, 2).reshape(B, S, -1))


class Falcon(nn.Module):
    """Query heads, one key head and one value head, in one projection."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.ln, self.query_key_value = nn.LayerNorm(dim), nn.Linear(dim, dim + 2 * self.head_dim)
        self.dense, self.h4h, self.fhh = nn.Linear(dim, dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        B, S, _ = x.shape
        h = self.ln(x)
        fused = self.query_key_value(h).view(B, S, self.num_heads + 2, self.head_dim)
        q, k, v = fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = k.expand_as(q), v.expand_as(q)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, -1)
        return x + self.dense(a) + self.fhh(F.gelu(self.h4h(h)))


class FalconGrouped(nn.Module):
    """Groups of query heads with their key and value head, one group after another."""

    def __init__(self, dim, heads=8, kv_heads=4):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.ln = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, dim + 2 * kv_heads * self.head_dim)
        self.dense = nn.Linear(dim, dim)

    def forward(self, x):
        B, S, _ = x.shape
        qkv = self.query_key_value(self.ln(x))
        qkv = qkv.view(B, S, -1, self.num_heads // self.num_kv_heads + 2, self.head_dim)
        q, k, v = qkv[:, :, :, :-2], qkv[:, :, :, [-2]], qkv[:, :, :, [-1]]
        k, v = torch.broadcast_to(k, q.shape), torch.broadcast_to(v, q.shape)
        q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        return x + self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, S, -1))


class Latent(nn.Module):
    """Multi-head latent attention: keys and values from a small vector, and one rotated key shared by all heads."""

    def __init__(self, dim, heads=4, nope=4, rope=2, rank=6):
        super().__init__()
        self.H, self.nope, self.rope, self.rank = heads, nope, rope, rank
        self.norm, self.kv_norm = RMSNorm(dim), RMSNorm(rank)
        self.q_proj = nn.Linear(dim, heads * (nope + rope), bias=False)
        self.kv_a = nn.Linear(dim, rank + rope)
        self.kv_b = nn.Linear(rank, heads * (nope + nope))
        self.o_proj = nn.Linear(heads * nope, dim)

    def shared(self, k_pe, k):
        return k_pe.expand(-1, self.H, -1, -1)

    def forward(self, x):
        B, S, _ = x.shape
        h = self.norm(x)
        q = self.q_proj(h).view(B, S, self.H, self.nope + self.rope).transpose(1, 2)
        kv, k_pe = self.kv_a(h).split([self.rank, self.rope], dim=-1)
        k_pe = torch.sin(k_pe.view(B, S, 1, self.rope).transpose(1, 2))
        kv = self.kv_b(self.kv_norm(kv)).view(B, S, self.H, 2 * self.nope).transpose(1, 2)
        k, v = kv.split([self.nope, self.nope], dim=-1)
        k = torch.cat([k, self.shared(k_pe, k)], -1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o_proj(a.transpose(1, 2).reshape(B, S, -1))


class LatentAgnostic(Latent):
    """The same with sizes taken from tensors: nothing in the shapes shows what is shared."""

    def forward(self, x):
        B, S, _ = x.shape
        h = self.norm(x)
        q = self.q_proj(h).view(B, S, -1, self.nope + self.rope).transpose(1, 2)
        kv, k_pe = self.kv_a(h).split([self.rank, self.rope], dim=-1)
        k_pe = torch.sin(k_pe.view(B, S, 1, self.rope).transpose(1, 2))
        kv = self.kv_b(self.kv_norm(kv)).view(B, S, -1, 2 * self.nope).transpose(1, 2)
        k, v = kv.split([self.nope, self.nope], dim=-1)
        k = torch.cat([k, k_pe.expand(-1, k.shape[1], -1, -1)], -1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o_proj(a.transpose(1, 2).reshape(B, S, -1))


class LatentFilled(Latent):
    """The same, the key written into a new tensor in place, as the first published code does."""

    def forward(self, x):
        B, S, _ = x.shape
        h = self.norm(x)
        q = self.q_proj(h).view(B, S, self.H, self.nope + self.rope).transpose(1, 2)
        kv, k_pe = self.kv_a(h).split([self.rank, self.rope], dim=-1)
        k_pe = torch.sin(k_pe.view(B, S, 1, self.rope).transpose(1, 2))
        kv = self.kv_b(self.kv_norm(kv)).view(B, S, self.H, 2 * self.nope).transpose(1, 2)
        nope, v = kv.split([self.nope, self.nope], dim=-1)
        k = k_pe.new_empty(B, self.H, S, self.nope + self.rope)
        k[..., : self.nope] = nope
        k[..., self.nope :] = k_pe
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o_proj(a.transpose(1, 2).reshape(B, S, -1))


class Alibi(nn.Module):
    """A slope a head, in a buffer; a temperature and a gate a head, in parameters of attention itself."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.register_buffer("slopes", torch.linspace(0.1, 1, heads, dtype=torch.get_default_dtype()))
        self.temperature, self.gate = nn.Parameter(torch.rand(heads, 1, 1)), nn.Parameter(torch.rand(heads))
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        at = torch.arange(n)
        bias = -(at[:, None] - at[None]).abs().to(x.dtype) * self.slopes.view(-1, 1, 1)
        w = ((q @ k.mT) * self.temperature + bias).masked_fill(at[None] > at[:, None], float("-inf")).softmax(-1)
        y = torch.einsum("bhqk,bhkd->bqhd", w, v) * self.gate[:, None]
        return x + self.o(y.reshape(b, n, d))
