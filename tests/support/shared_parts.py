"""Models whose blocks share modules or tensors with code outside of them, or take activations of several forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.block_habits import VOCAB
from support.branching_models import Block, Conditioned, Listed

__all__ = ["SHARED_PARTS"]


class Collected(Listed):
    """Features that blocks append to a list are pooled over the sequence."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.layers = nn.ModuleList(Keeping(self.kept) for _ in range(2))

    def forward(self, tokens):
        self.kept.clear()
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + self.out(torch.stack(self.kept).amax((0, 2)))[:, None]


class Hooked(Collected):
    """As above, of what hooks are given: of the blocks, and of sharded projections in one."""

    def __init__(self, inner=False):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        for layer in self.layers:
            hooked = layer.up if inner else layer
            hooked.register_forward_hook(lambda module, args, output: self.kept.append(output[..., :16]))


class HookedInside(Hooked):
    def __init__(self):
        super().__init__(inner=True)


class Keeping(Block):
    """It appends what it returns to a list, too."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def forward(self, x, memory=None):
        y = super().forward(x)
        self.kept.append(y)
        return y


class LentFeed(Listed):
    """The model's own code calls the feed-forward of a block once more."""

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.layers[0].down(self.layers[0].up(x).relu()))


class SharedNorm(Listed):
    """The norm of the first block is the one after the last, too."""

    def __init__(self):
        super().__init__()
        self.norm = self.layers[0].norm

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


class Fused(nn.Module):
    """One projection for all three, and a number of heads that the code writes out."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.heads, self.qkv, self.o = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, S, C = x.shape
        q, k, v = (t.view(B, S, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, S, C))


class Towers(nn.Module):
    """Two stacks of blocks of equal rank, with positions and projections of the model's own, as CLIP has."""

    def __init__(self, dim=16, num_layers=2):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.left, self.right = (nn.ModuleList(Fused(dim) for _ in range(num_layers)) for _ in range(2))
        self.positions = nn.Parameter(torch.randn(64, dim))
        self.projection = nn.Parameter(torch.randn(dim, dim) / 4)

    def forward(self, tokens):
        left = right = self.emb(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.left:
            left = layer(left)
        for layer in self.right:
            right = layer(right)
        return self.out(left @ self.projection + F.normalize(right, dim=-1))


class Channels(nn.Module):
    """A parameter for every channel, which is the second dim or the last."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(dim))

    def forward(self, x, dim=1):
        return x * self.scale.view(-1, *(1,) * (x.ndim - 1 - dim % x.ndim))


class NormedConditions(Conditioned):
    def __init__(self, dim=16):
        super().__init__()
        self.layers = nn.ModuleList(NormedTwice(dim) for _ in range(2))


class NormedTwice(nn.Module):
    """One norm for what has a sequence and what has none."""

    def __init__(self, dim=16):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(dim, 32), nn.Linear(32, dim), nn.LayerNorm(dim)

    def forward(self, x, condition):
        return x + self.down(self.up(self.norm(x)).relu()) + self.norm(condition)


class Transposed(Conditioned):
    def __init__(self, dim=16):
        super().__init__()
        self.layers = nn.ModuleList(Transposing(dim) for _ in range(2))


class Transposing(nn.Module):
    """Modules with parameters on activations of channels first, x_BDS, and on both forms."""

    def __init__(self, dim=16):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.prelu, self.scale, self.both = nn.PReLU(2 * dim), Channels(2 * dim), Channels(2 * dim)

    def forward(self, x, condition):
        y = self.both(self.up(x), -1).transpose(1, 2)
        y = self.both(self.scale(self.prelu(y))).transpose(1, 2)
        return x + self.down(y) + condition


SHARED_PARTS = {
    "SharedNorm": SharedNorm,
    "LentFeed": LentFeed,
    "Collected": Collected,
    "Hooked": Hooked,
    "HookedInside": HookedInside,
    "NormedConditions": NormedConditions,
    "Transposed": Transposed,
    "Towers": Towers,
}
