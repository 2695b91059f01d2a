"""What the loops have in common: a small Llama in plain torch, its data, and the loss. No parallel code.

Weights and data are the same in every process that asks for them. Shape suffixes: B batch, T position, D model dim,
H heads, K dim of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Config", "batches", "build", "loss_fn", "read_config"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes; `batch` is that of one rank, and there are `num_ranks` of them."""

    dim: int = 256
    num_layers: int = 8
    num_heads: int = 8
    hidden_dim: int = 704
    vocab_size: int = 2048
    seq_len: int = 256
    batch: int = 4
    num_ranks: int = 2
    steps: int = 30
    lr: float = 3e-4
    clip: float = 1.0
    seed: int = 0


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * torch.rsqrt(x_BTD.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            w(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q_BHTK, k_BHTK = (x * cos_TK + rotate(x) * sin_TK for x in (q_BHTK, k_BHTK))
        o_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.wo(o_BHTK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(config.dim, config.hidden_dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.dim), RMSNorm(config.dim)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.mlp(self.norm2(x_BTD))


class SmallLlama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm, self.out = RMSNorm(config.dim), nn.Linear(config.dim, config.vocab_size, bias=False)
        head_dim = config.dim // config.num_heads
        frequency = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angle = torch.outer(torch.arange(config.seq_len).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.tok(tokens_BT)
        length = tokens_BT.shape[1]
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.cos[:length], self.sin[:length])
        return self.out(self.norm(x_BTD))


def rotate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def read_config() -> Config:
    """Return the configuration, with the number of steps from the command line if it is there."""
    return Config(steps=int(sys.argv[1])) if len(sys.argv) > 1 else Config()


def build(config: Config) -> SmallLlama:
    torch.manual_seed(config.seed)
    return SmallLlama(config)


def batches(config: Config, rank: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a rank's batches, or without a rank the whole global batch: random tokens, a stream of its own a rank."""
    ranks = range(config.num_ranks) if rank is None else [rank]
    generators = [torch.Generator().manual_seed(1234 + rank) for rank in ranks]
    shape = (config.batch, config.seq_len + 1)
    for _ in range(config.steps):
        tokens = torch.cat([torch.randint(0, config.vocab_size, shape, generator=g) for g in generators])
        yield tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), target_BT.flatten())
