"""Blocks that draw random numbers on sharded features, on whole activations, between both, by every kind of call."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from composer3d import torch_compat
from support.block_habits import Model

P = 0.5
# By block, what its sites let through: no attribute, since a recomputation's changes of those are put back.
SEEN: WeakKeyDictionary[nn.Module, dict[str, list[torch.Tensor]]] = WeakKeyDictionary()


def keep(block, site, after):
    """Note which elements a site of a block let through; on meta nothing is."""
    with torch_compat.without_torch_functions():
        if not after.is_meta:
            # What alpha dropout drops becomes the least value; of fused attention its result is all that is seen.
            through = after if site == "fused" else after != (after.min() if site == "alpha" else 0)
            SEEN.setdefault(block, {}).setdefault(site, []).append(through.detach().clone())
    return after


class Drawing(nn.Module):
    """Open sizes, so that nothing but its random numbers asks for its code to be propagated; probabilities of any name.

    SEEN keeps what each site let through: of the features of a rank, or of whole activations.
    """

    def __init__(self, dim, heads=4):
        super().__init__()
        self.width, self.p_attn, self.rate = dim // heads, P, P
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down, self.between = nn.Linear(dim, 32), nn.Linear(32, dim), nn.AlphaDropout(P)
        self.after = nn.Dropout(P)

    def forward(self, x):
        B, S = x.shape[:2]
        q, k, v = (f(x).view(B, S, -1, self.width).transpose(1, 2) for f in (self.q, self.k, self.v))
        # Whole, in an open region: every rank has to draw the same.
        x = keep(self, "whole in region", F.dropout(x, self.rate, self.training))
        w = keep(self, "weights", F.dropout((q @ k.mT).softmax(-1), self.p_attn, self.training))
        a = w @ v
        a = keep(self, "like", a * torch.rand_like(a).gt(P))
        path = keep(self, "path", x.new_empty(B, 1, 1).bernoulli_(P))
        x = x + path * self.o(a.transpose(1, 2).flatten(2))
        h = F.relu(self.up(x)) + 1.0
        h = keep(self, "written", h * torch.empty_like(h).bernoulli_(P))
        h = keep(self, "alpha", self.between(h))
        return x + keep(self, "module on whole", self.after(self.down(h)))


class Fused(nn.Module):
    """Attention draws inside of one function."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.width = dim // heads
        self.q, self.k, self.o = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, S = x.shape[:2]
        q, k = (f(x).view(B, S, -1, self.width).transpose(1, 2) for f in (self.q, self.k))
        # Equal weights, and values that are one: what is seen is the share of keys that were let through.
        a = F.scaled_dot_product_attention(
            q * 0, k * 0, torch.ones_like(k), dropout_p=P if self.training else 0.0, is_causal=False
        )
        keep(self, "fused", a)
        return x + self.o((a * k).transpose(1, 2).flatten(2))


DRAWING = {"Drawing": lambda: Model(Drawing), "Fused": lambda: Model(Fused)}
CUT = {"weights", "like", "written", "alpha", "fused"}
WHOLE = {"whole in region", "path", "module on whole"}
