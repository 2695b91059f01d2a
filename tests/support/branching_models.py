"""Models whose activations do not just go from block to block, or whose blocks take more than one sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.block_habits import VOCAB, RMSNorm


class Attention(nn.Module):
    """Of any two sequences; it reads the length of the sequence before its projections, as transformers' Llama does."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.head_dim = dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, memory=None):
        source = x if memory is None else memory
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q(x).view(shape).transpose(1, 2)
        k, v = (f(source).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=memory is None)
        return self.o(out.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Block(nn.Module):
    """Attention, attention to a memory if there is one, and a feed-forward."""

    def __init__(self, dim=16, cross=False):
        super().__init__()
        self.norm, self.attention = RMSNorm(dim), Attention(dim)
        self.cross = Attention(dim) if cross else None
        self.up, self.down, self.drop = nn.Linear(dim, 32), nn.Linear(32, dim), nn.Dropout(0.0)

    def forward(self, x, memory=None):
        x = x + self.attention(self.norm(x))
        if self.cross is not None:
            x = x + self.cross(x, memory=memory)
        return x + self.drop(self.down(self.up(x).relu()))


class Listed(nn.Module):
    def __init__(self, *, num_layers=3, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))


class Seq2Seq(nn.Module):
    """An encoder of one layer and a decoder of two."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.norm, self.out = nn.Embedding(VOCAB, dim), RMSNorm(dim), nn.Linear(dim, VOCAB)
        self.encoder = nn.ModuleList([Block(dim)])
        self.decoder = nn.ModuleList(Block(dim, cross=True) for _ in range(2))

    def forward(self, tokens):
        memory = self.emb(tokens.flip(1))
        for layer in self.encoder:
            memory = layer(memory)
        memory, x = self.norm(memory), self.emb(tokens)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.out(x)


class Torch(nn.Module):
    """torch's own encoder, and decoder that is normed first."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        layer = {"d_model": dim, "nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        encoder, decoder = nn.TransformerEncoderLayer(**layer), nn.TransformerDecoderLayer(**layer, norm_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.emb(tokens)
        return self.out(self.decoder(x, self.encoder(x.flip(1)), tgt_mask=mask, tgt_is_causal=True))


class Skipping(Listed):
    """The first block's result is added again before the last one."""

    def forward(self, tokens):
        kept = x = self.layers[0](self.emb(tokens))
        for layer in self.layers[1:-1]:
            x = layer(x)
        return self.out(self.layers[-1](x + kept))


class Averaged(Listed):
    """Every block's result is used once more at the end."""

    def forward(self, tokens):
        xs = [self.emb(tokens)]
        for layer in self.layers:
            xs.append(layer(xs[-1]))
        return self.out(torch.stack(xs).mean(0))


class Shared(Listed):
    """One block that is called three times."""

    def __init__(self):
        super().__init__(num_layers=1)

    def forward(self, tokens):
        x = self.emb(tokens)
        for _ in range(3):
            x = self.layers[0](x)
        return self.out(x)


class SharedFeed(nn.Module):
    """Layers of a dictionary each, of which all have one feed-forward."""

    def __init__(self, dim=16):
        super().__init__()
        feed = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(dim), "norm": nn.LayerNorm(dim), "feed": feed}) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = x + layer["attention"](x)
            x = x + layer["feed"](layer["norm"](x))
        return self.out(x)


class Mixture(nn.Module):
    """Two experts, of which every token takes both."""

    def __init__(self, dim):
        super().__init__()
        self.router = nn.Linear(dim, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim)) for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return sum(weights[..., index, None] * expert(x) for index, expert in enumerate(self.experts))


class Multiplied(nn.Module):
    """A parameter that the forward multiplies by itself."""

    def __init__(self, dim):
        super().__init__()
        self.inner, self.outer = (nn.Parameter(torch.randn(dim, dim) / 4) for _ in range(2))

    def forward(self, x):
        return torch.relu(x @ self.inner) @ self.outer


class Fed(nn.Module):
    """A part of its own, and a feed-forward that others have too."""

    def __init__(self, part, feed, dim):
        super().__init__()
        self.part, self.feed, self.norm = part, feed, nn.LayerNorm(dim)

    def forward(self, x):
        x = x + self.part(x)
        return x + self.feed(self.norm(x))


class SharedMixture(Listed):
    """Unequal layers with one mixture, whose experts are the model's only list of equal modules."""

    def __init__(self, dim=16):
        super().__init__()
        feed = Mixture(dim)
        self.layers = nn.ModuleList(Fed(part(dim), feed, dim) for part in (Attention, Multiplied, RMSNorm))

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Repeated(nn.Module):
    """A list of one block, called three times: its first layer is given the embedding, then what its last one gave."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        block = nn.Sequential(nn.Linear(dim, 32), nn.LayerNorm(32), nn.Linear(32, dim))
        self.layers = nn.ModuleList([block] * 3)

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Modulated(nn.Module):
    """Scaled by what a feed-forward makes of a condition, which has no sequence."""

    def __init__(self, dim=16):
        super().__init__()
        self.block = Block(dim)
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, 2 * dim)

    def forward(self, x, condition):
        shift, scale = self.down(F.silu(self.up(condition))).chunk(2, -1)
        return self.block(x * (1 + scale) + shift)


class Conditioned(nn.Module):
    """As diffusion transformers."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList(Modulated(dim) for _ in range(2))

    def forward(self, tokens):
        x = self.emb(tokens)
        condition = x[:, :1]
        for layer in self.layers:
            x = layer(x, condition)
        return self.out(x)


class Core(nn.Module):
    """What lies between projections, with sizes of the whole model."""

    def __init__(self, heads, dropout):
        super().__init__()
        self.H, self.dropout = heads, dropout

    def forward(self, q, k, v):
        B, S, C = q.shape
        q, k, v = (t.view(B, S, self.H, C // self.H).transpose(1, 2) for t in (q, k, v))
        weights = F.dropout((q @ k.mT).softmax(-1), self.dropout, self.training)
        return (weights @ v).transpose(1, 2).reshape(B, S, C)


class Recomputed(nn.Module):
    """Parts of it are computed again in the backward, by its own code."""

    def __init__(self, dim, dropout, again):
        super().__init__()
        self.again, self.core = again, Core(4, dropout)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.Dropout(dropout), nn.Linear(32, dim))

    def forward(self, x):
        B, S, C = x.shape
        q, k, v = (f(x).view(B, S, C) for f in (self.q, self.k, self.v))
        x = x + self.o(self._run(self.core, q, k, v))
        return x + self._run(self.mlp, x)

    def _run(self, part, *args):
        return checkpoint(part, *args, use_reentrant=False) if self.again else part(*args)


class RecomputedModel(nn.Module):
    def __init__(self, dropout=0.0, again=True, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList(Recomputed(dim, dropout, again) for _ in range(2))

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Evaluated(nn.Module):
    """A block that does another thing in evaluation: there it writes out sizes of the whole model."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.H, self.q, self.v, self.o = heads, *(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        B, S, C = x.shape
        q, v = self.q(x), self.v(x)
        if self.training:
            return x + self.o(q.sigmoid() * v)
        q, v = (t.view(B, S, self.H, C // self.H) for t in (q, v))
        return x + self.o((q.sigmoid() * v).reshape(B, S, C))


class EvaluatedModel(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList(Evaluated(dim) for _ in range(2))

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


FLOWS = {
    "Seq2Seq": Seq2Seq,
    "Torch": Torch,
    "Skipping": Skipping,
    "Averaged": Averaged,
    "Shared": Shared,
    "SharedFeed": SharedFeed,
    "SharedMixture": SharedMixture,
    "Repeated": Repeated,
    "Conditioned": Conditioned,
    "Evaluated": EvaluatedModel,
    "Recomputed": RecomputedModel,
}
