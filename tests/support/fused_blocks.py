"""Blocks with one projection for everything, of which the code takes constants' worth of features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.block_habits import RMSNorm


class ParallelFused(nn.Module):
    """PaLM: query, the one key and value of all heads, and feed-forward side by side from one matrix."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads, self.parts = heads, (dim, dim // heads, dim // heads, 64)
        self.norm, self.fused = RMSNorm(dim), nn.Linear(dim, sum(self.parts), bias=False)
        self.attention_out, self.ff_out = nn.Linear(dim, dim, bias=False), nn.Linear(32, dim, bias=False)

    def forward(self, x):
        B, S, D = x.shape
        q, k, v, ff = self.fused(self.norm(x)).split(self.parts, dim=-1)
        scores = torch.einsum("bihd,bjd->bhij", q.view(B, S, self.heads, -1), k)
        weights = scores.masked_fill(torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1), -1e9).softmax(-1)
        out = torch.einsum("bhij,bjd->bihd", weights, v).reshape(B, S, D)
        value, gate = ff.chunk(2, dim=-1)
        return x + self.attention_out(out) + self.ff_out(F.silu(gate) * value)


class SpatialGating(nn.Module):
    """gMLP: half of the features, normed over all of them and mixed along the sequence, gate the other half."""

    def __init__(self, dim):
        super().__init__()
        self.inp, self.out = nn.Linear(dim, 64), nn.Linear(32, dim)
        self.norm, self.mix = nn.LayerNorm(32), nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x):
        u, v = F.gelu(self.inp(x)).chunk(2, dim=-1)
        return x + self.out(u * (1 + self.mix(self.norm(v).transpose(1, 2)).transpose(1, 2)))


class Selective(nn.Module):
    """Mamba: parameters of every channel, met in einsums, and a state of a size that the code knows."""

    def __init__(self, dim, state=4):
        super().__init__()
        self.inner, self.state, self.rank = 2 * dim, state, 3
        self.in_proj, self.out_proj = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        self.conv = nn.Conv1d(2 * dim, 2 * dim, 3, padding=2, groups=2 * dim)
        self.x_proj, self.dt_proj = nn.Linear(2 * dim, 3 + 2 * state, bias=False), nn.Linear(3, 2 * dim)
        self.log_decay, self.skip = nn.Parameter(torch.rand(2 * dim, state)), nn.Parameter(torch.rand(2 * dim))

    def forward(self, x):
        B, S, _ = x.shape
        u, gate = self.in_proj(x).split([self.inner, self.inner], dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[:, :, :S].transpose(1, 2))
        dt, b, c = self.x_proj(u).split([self.rank, self.state, self.state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        decay = torch.exp(torch.einsum("bsd,dn->bsdn", dt, -torch.exp(self.log_decay)))
        given = torch.einsum("bsd,bsn,bsd->bsdn", dt, b, u)
        state, outputs = torch.zeros(B, self.inner, self.state, dtype=x.dtype, device=x.device), []
        for at in range(S):
            state = decay[:, at] * state + given[:, at]
            outputs.append(torch.einsum("bdn,bn->bd", state, c[:, at]))
        return x + self.out_proj((torch.stack(outputs, 1) + u * self.skip) * F.silu(gate))


BLOCKS = (ParallelFused, SpatialGating, Selective)
