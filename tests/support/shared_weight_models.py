"""Models whose weights have several names, are read by code of other modules, or are computed from other parameters."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from support.block_habits import VOCAB, RMSNorm


class Stack(nn.Module):
    """Half of an encoder and decoder; its embedding is the model's."""

    def __init__(self, embedding, dim, is_decoder):
        super().__init__()
        self.embed_tokens = embedding
        self.block = nn.ModuleList(StackBlock(dim, at == 0, is_decoder) for at in range(2))
        self.norm = RMSNorm(dim)

    def forward(self, tokens, memory=None):
        x, bias = self.embed_tokens(tokens), None
        for block in self.block:
            x, bias = block(x, bias, memory)
        return self.norm(x)


class StackBlock(nn.Module):
    def __init__(self, dim, has_bias, is_decoder):
        super().__init__()
        self.layer = nn.ModuleList([HeadsWithBias(dim, has_bias)])
        if is_decoder:
            self.layer.append(HeadsWithBias(dim, False))
        self.layer.append(nn.ModuleDict({"wi": nn.Linear(dim, 32), "wo": nn.Linear(32, dim)}))

    def forward(self, x, bias, memory):
        y, bias = self.layer[0](x, bias, x)
        x = x + y
        if memory is not None:
            x = x + self.layer[1](x, None, memory)[0]
        feed_forward = self.layer[-1]
        return x + feed_forward.wo(F.relu(feed_forward.wi(x))), bias


class HeadsWithBias(nn.Module):
    def __init__(self, dim, has_bias, heads=4):
        super().__init__()
        self.n_heads, self.d_kv, self.inner = heads, dim // heads, dim
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.relative = nn.Embedding(8, heads) if has_bias else None

    def forward(self, x, bias, source):
        B, S, _ = x.shape
        q, k, v = (
            t.view(B, -1, self.n_heads, self.d_kv).transpose(1, 2) for t in (self.q(x), self.k(source), self.v(source))
        )
        scores = q @ k.transpose(2, 3)
        if self.relative is not None:
            at = torch.arange(S)
            bias = self.relative((at[None] - at[:, None]).clamp(0, 7)).permute(2, 0, 1)[None]
        if bias is not None:
            scores = scores + bias
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, -1, self.inner)), bias


class SharedEmbedding(nn.Module):
    """One module under three names, tied to the head."""

    def __init__(self, dim=16):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, dim)
        self.encoder, self.decoder = Stack(self.shared, dim, False), Stack(self.shared, dim, True)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, tokens):
        return self.lm_head(self.decoder(tokens, self.encoder(tokens.flip(1))) * 0.25)


class TransposedHead(nn.Module):
    """Logits by the embedding's weight, which the model's own code reads."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, dim), RMSNorm(dim)
        self.layers = nn.ModuleList(UnevenHeads(dim, heads=4) for _ in range(2))

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.emb.weight.T


class UnevenHeads(nn.Module):
    """Heads that do not divide by 2, beside a feed-forward that does."""

    def __init__(self, dim, heads=1):
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        B, S, D = x.shape
        q, k, v = (t.view(B, S, self.num_heads, D // self.num_heads).transpose(1, 2) for t in (f(x) for f in self.qkv))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D))
        return x + self.down(F.gelu(self.up(x)))

    @property
    def qkv(self):
        return self.q, self.k, self.v


class ReadWeight(nn.Module):
    """A weight that the code around its layer reads too."""

    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)
        self.first, self.second = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x))) * (1 + self.up.weight.mean())
        return x + self.second(F.gelu(self.first(x)))


class Repeated(nn.Module):
    """ALBERT: one block in a list of lists, called three times."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.groups = nn.ModuleList([nn.ModuleList([UnevenHeads(dim, heads=4)])])

    def forward(self, tokens):
        x = self.emb(tokens)
        for _ in range(3):
            for block in self.groups[0]:
                x = block(x)
        return self.out(x)


class NextToken(nn.Module):
    """A block beside the list, as predictions of further tokens have, that uses a module of a block in the list."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out, self.join = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB), nn.Linear(2 * dim, dim)
        self.layers = nn.ModuleList(UnevenHeads(dim, heads=4) for _ in range(2))
        self.further, self.shared = UnevenHeads(dim, heads=4), self.layers[1]

    def forward(self, tokens):
        x = self.emb(tokens)
        y = self.join(torch.cat([x, x.roll(1, 1)], -1))
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + self.out(self.shared(self.further(y)))


def normed(linear):
    return nn.utils.parametrizations.weight_norm(linear)


def normed_by_hook(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(linear)


def spectral(linear):
    return nn.utils.parametrizations.spectral_norm(linear)


class Parametrised(nn.Module):
    """Layers whose weights are computed, beside others."""

    def __init__(self, dim):
        super().__init__()
        self.up, self.down = normed(nn.Linear(dim, 32)), normed(nn.Linear(32, dim))
        self.left, self.right = normed_by_hook(nn.Linear(dim, 32)), normed_by_hook(nn.Linear(32, dim))
        self.bounded = spectral(nn.Linear(dim, dim))
        self.first, self.second = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x))) + self.right(F.gelu(self.left(x)))
        return x + self.bounded(self.second(F.gelu(self.first(x))))


class ShiftedTokens(nn.Module):
    """The sequence moved on by one with a pad that adds nothing to its length, as RWKV does."""

    def __init__(self, dim):
        super().__init__()
        self.shift, self.mix = nn.ZeroPad2d((0, 0, 1, -1)), nn.Parameter(torch.rand(dim))
        self.key, self.value = nn.Linear(dim, 32, bias=False), nn.Linear(32, dim, bias=False)

    def forward(self, x):
        return x + self.value(self.key(x * self.mix + self.shift(x) * (1 - self.mix)).relu() ** 2)


class WholeDepthwise(nn.Module):
    """A depthwise convolution of features that are whole, along the sequence."""

    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, padding=2, groups=dim)
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        x = x + self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.down(F.gelu(self.up(x)))


class ChannelsFirstBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(dim, dim, 3, padding=1, groups=dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class ChannelsFirst(nn.Module):
    """ConvNeXt: what sequence_parallel shards are channels, of which a depthwise convolution takes each by itself."""

    def __init__(self, dim=8):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, dim, 4, 4), nn.Linear(dim, VOCAB)
        self.blocks = nn.ModuleList(ChannelsFirstBlock(dim) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


BLOCKS = (UnevenHeads, ReadWeight, Parametrised, ShiftedTokens, WholeDepthwise)
MODELS = (SharedEmbedding, TransposedHead, ChannelsFirst, Repeated, NextToken)
