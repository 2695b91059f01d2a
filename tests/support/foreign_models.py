"""Models as somebody might bring them, and all strange blocks in a plain language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.block_habits import VOCAB, Model, RMSNorm
from support.foreign_attention import (
    GPTJ,
    Alibi,
    Falcon,
    FalconGrouped,
    Latent,
    LatentAgnostic,
    LatentFilled,
    MultiQuery,
    MultiQueryExpanded,
    MultiQueryRepeated,
)
from support.foreign_blocks import (
    Depthwise,
    EinsumWeights,
    Gated,
    Named,
    Picked,
    Pooled,
    Scaled,
    Sliced,
    Uneven,
)
from support.fused_blocks import BLOCKS as FUSED
from support.shared_weight_models import BLOCKS as UNOWNED
from support.shared_weight_models import MODELS as UNOWNED_MODELS
from support.value_reading_models import BLOCKS as LOOKING
from support.value_reading_models import MODELS as LOOKING_MODELS


class Encoder(nn.Module):
    """torch's own encoder layers, whose attention has its projections as one parameter."""

    def __init__(self, dim=16, norm_first=False):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        return self.out(self.encoder(self.emb(tokens)))


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.transformer = nn.Transformer(dim, 4, 1, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        x = self.emb(tokens)
        return self.out(self.transformer(x, x.flip(1)))


class T5(nn.Module):
    """An encoder and a decoder; a learned bias a head, made by the first layer and handed to the others."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.shared, self.lm_head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB, bias=False)
        self.encoder = nn.ModuleList(T5Layer(dim, heads, has_bias=at == 0) for at in range(2))
        self.decoder = nn.ModuleList(T5Layer(dim, heads, has_bias=at == 0, cross=True) for at in range(2))
        self.lm_head.weight = self.shared.weight

    def forward(self, tokens):
        memory = x = self.shared(tokens)
        bias = None
        for layer in self.encoder:
            memory, bias = layer(memory, bias)
        bias = None
        for layer in self.decoder:
            x, bias = layer(x, bias, memory)
        return self.lm_head(x * 0.25)


class T5Attention(nn.Module):
    def __init__(self, dim, heads, has_bias):
        super().__init__()
        self.n_heads, self.d_kv = heads, dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        if has_bias:
            self.relative_attention_bias = nn.Embedding(8, heads)

    def forward(self, x, bias, memory=None):
        B, S, _ = x.shape
        source = x if memory is None else memory
        q, k, v = (
            t.view(B, -1, self.n_heads, self.d_kv).transpose(1, 2) for t in (self.q(x), self.k(source), self.v(source))
        )
        scores = torch.matmul(q, k.transpose(3, 2))
        if bias is None:
            at = torch.arange(S)
            bias = torch.zeros(1, self.n_heads, S, S, dtype=x.dtype)
            if hasattr(self, "relative_attention_bias"):
                bias = self.relative_attention_bias((at[None] - at[:, None]).clamp(0, 7)).permute(2, 0, 1).unsqueeze(0)
        scores = scores + bias
        w = F.dropout(F.softmax(scores.float().type_as(scores), dim=-1), p=0.0, training=self.training)
        return self.o(torch.matmul(w, v).transpose(1, 2).contiguous().view(B, -1, self.n_heads * self.d_kv)), bias


class T5Layer(nn.Module):
    def __init__(self, dim, heads, has_bias, cross=False):
        super().__init__()
        self.attention, self.norm = T5Attention(dim, heads, has_bias), RMSNorm(dim)
        self.cross = T5Attention(dim, heads, has_bias=False) if cross else None
        self.wi_0, self.wi_1, self.wo = nn.Linear(dim, 24), nn.Linear(dim, 24), nn.Linear(24, dim)

    def forward(self, x, bias, memory=None):
        y, bias = self.attention(self.norm(x), bias)
        x = x + y
        if self.cross is not None:
            x = x + self.cross(x, None, memory)[0]
        return x + self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)), bias


class Convolutions(nn.Module):
    """Nothing to shard but the head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(2))
        self.fc = nn.Linear(8, VOCAB)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = F.relu(stage(x))
        return self.fc(x.mean((2, 3)))


class TiedBias(nn.Module):
    """A decoder tied to the embedding, with a bias of its own, and a pooled class beside it."""

    def __init__(self, dim=16):
        super().__init__()
        self.word, self.kind = nn.Embedding(VOCAB, dim), nn.Embedding(2, dim)
        self.layer = nn.ModuleList(Named(dim) for _ in range(2))
        self.pooler, self.decoder = nn.Linear(dim, dim), nn.Linear(dim, VOCAB, bias=False)
        self.bias = nn.Parameter(torch.rand(VOCAB))
        self.decoder.weight = self.word.weight

    def forward(self, tokens):
        x = self.word(tokens) + self.kind(torch.zeros_like(tokens))
        for layer in self.layer:
            x = layer(x)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return self.decoder(x) + self.bias + 0.01 * pooled.sum(-1)[:, None, None]


class Head(nn.Module):
    """A bias that is a parameter of its own too, by whose name nothing reads it."""

    def __init__(self, dim):
        super().__init__()
        self.bias, self.decoder = nn.Parameter(torch.rand(VOCAB)), nn.Linear(dim, VOCAB)
        self.decoder.bias = self.bias

    def forward(self, x):
        return self.decoder(x)


class TiedHead(nn.Module):
    """A head as BERT has it: tied to the embedding, with a bias that has two names."""

    def __init__(self, dim=16):
        super().__init__()
        self.word, self.head = nn.Embedding(VOCAB, dim), Head(dim)
        self.layer = nn.ModuleList(Named(dim) for _ in range(2))
        self.head.decoder.weight = self.word.weight

    def forward(self, tokens):
        x = self.word(tokens)
        for layer in self.layer:
            x = layer(x)
        return self.head(x)


class NormedRows(nn.Embedding):
    """Norms the rows that it has looked up, and looks at its tokens again."""

    def __init__(self, dim=16):
        super().__init__(VOCAB, dim)
        self.norm = RMSNorm(dim)

    def forward(self, tokens):
        return self.norm(super().forward(tokens)) * (tokens != 0).unsqueeze(-1)


class NormedEmbedding(Model):
    """An embedding whose own code computes with its rows."""

    def __init__(self, dim=16):
        super().__init__(Named, dim)
        self.emb = NormedRows(dim)


class Mixed(nn.Module):
    """Blocks of two forms, one of which has nothing to shard."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList([Gated(dim), Pooled(dim), Scaled(dim), Pooled(dim)])

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Widths(nn.Module):
    """Stages of two widths in dictionaries; a projection between them that something behind the stages contracts."""

    def __init__(self, dim=12):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.stages = nn.ModuleList(
            nn.ModuleDict({"blocks": nn.ModuleList([Pair(width)]), "merge": nn.Linear(2 * width, 2 * width)})
            for width in (dim, 2 * dim)
        )
        self.head = nn.Linear(4 * dim, VOCAB)

    def forward(self, tokens):
        x = self.emb(tokens)
        for stage in self.stages:
            for block in stage["blocks"]:
                x = block(x)
            x = stage["merge"](torch.cat([x, x.roll(1, 1)], -1))
        return self.head(x - x.mean(1, keepdim=True))


class Pair(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class ShiftedChannels(nn.Module):
    """Blocks in which nothing can be sharded; a pair of projections beside them can."""

    def __init__(self, dim=9):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB + 1, dim), nn.Conv1d(dim, VOCAB, 1)
        self.time = nn.Sequential(nn.Linear(dim, 16), nn.SiLU(), nn.Linear(16, dim))
        self.down = nn.ModuleList(Normed(dim) for _ in range(2))

    def forward(self, tokens):
        x = self.emb(tokens)
        shift = self.time(x.mean(1))
        for block in self.down:
            x = block(x, shift)
        return self.out(x.transpose(1, 2)).transpose(1, 2)


class Normed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.conv, self.shift = nn.GroupNorm(3, dim), nn.Conv1d(dim, dim, 3, padding=1), nn.Linear(dim, dim)

    def forward(self, x, shift):
        return x + F.silu(self.norm(self.conv(x.transpose(1, 2)) + self.shift(shift)[:, :, None])).transpose(1, 2)


BLOCKS = {
    block.__name__: block
    for block in (
        GPTJ,
        MultiQuery,
        MultiQueryExpanded,
        MultiQueryRepeated,
        Falcon,
        FalconGrouped,
        Latent,
        LatentAgnostic,
        LatentFilled,
        Alibi,
        Sliced,
        Uneven,
        Named,
        EinsumWeights,
        Gated,
        Scaled,
        Depthwise,
        Picked,
        *UNOWNED,
        *LOOKING,
        *FUSED,
    )
}
STRANGERS = {name: (lambda block=block, **options: Model(block, **options)) for name, block in BLOCKS.items()} | {
    "Encoder": Encoder,
    "Translator": Translator,
    "T5": T5,
    "Mixed": Mixed,
    "TiedBias": TiedBias,
    "TiedHead": TiedHead,
    "NormedEmbedding": NormedEmbedding,
    "Convolutions": Convolutions,
    "Widths": Widths,
    "ShiftedChannels": ShiftedChannels,
    **{model.__name__: model for model in (*UNOWNED_MODELS, *LOOKING_MODELS)},
}
