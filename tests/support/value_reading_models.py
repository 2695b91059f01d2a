"""Models whose own code looks at values, which nothing on meta has; and weights of every sharded feature."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.block_habits import VOCAB


class Looking(nn.Module):
    """A block that looks at its activation before it does anything."""

    def __init__(self, dim, looks=True):
        super().__init__()
        self.looks, self.num_heads = looks, 4
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        if self.looks and x.abs().max().item() > 1e9:
            return x
        B, S, D = x.shape
        q, k, v = (t.view(B, S, self.num_heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D))
        return x + self.down(F.gelu(self.up(x)))


class Elementwise(nn.Module):
    """A weight and a bias of every hidden feature, as MobileBERT has them for a norm."""

    def __init__(self, dim):
        super().__init__()
        self.up, self.down, self.scaled = nn.Linear(dim, 32), nn.Linear(32, dim), Scale(32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.scaled(self.up(x))))


class Scale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(dim)), nn.Parameter(torch.rand(dim))

    def forward(self, x):
        return x * self.weight + self.bias


class Experts(nn.Module):
    """Tokens counted, sorted and sent to experts in a loop."""

    def __init__(self, dim, num_experts=4):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 8), nn.ReLU(), nn.Linear(8, dim)) for _ in range(num_experts)
        )
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x)))
        flat = x.reshape(-1, x.shape[-1])
        weight, expert = self.gate(flat).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=len(self.experts)).tolist()
        pieces = flat[order].split(counts)
        sent = torch.cat([module(piece) for module, piece in zip(self.experts, pieces, strict=True)])
        return x + (sent[order.argsort()] * weight[:, None]).view_as(x)


class LookingModel(nn.Module):
    """Looks at its tokens, as transformers does for packed sequences; half of its blocks look too."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList(Looking(dim, looks=at % 2 == 1) for at in range(4))

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if (positions.diff() != 1).any() or tokens.max().item() >= VOCAB:
            raise ValueError("packed sequences")
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


BLOCKS = (Looking, Elementwise, Experts)
MODELS = (LookingModel,)
