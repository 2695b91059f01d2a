"""Models as somebody might bring them: attention that shares keys over heads, biases a head, torch's own layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from support.blocks import VOCAB, Model, RMSNorm


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
    """Nothing to cut."""

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


class Sliced(nn.Module):
    """Features taken by numbers that are written out."""

    def __init__(self, dim):
        super().__init__()
        self.inp, self.out = nn.Linear(dim, 48), nn.Linear(16, dim)

    def forward(self, x):
        h = self.inp(x)
        return x + self.out(h[..., :16] * h[..., 16:32].sigmoid() + h[..., 32:48].tanh())


class Uneven(nn.Module):
    """Features taken through the shares of the ranks."""

    def __init__(self, dim):
        super().__init__()
        self.inp, self.out = nn.Linear(dim, 48), nn.Linear(12, dim)
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        h = self.inp(x)
        x = x + self.out(h[..., 5:17] * h[..., 17:29] + h[..., 36:48])
        return x + self.down(self.up(x).relu())


class Named(nn.Module):
    """Open sizes, other names, a residual inside, dropout as a function with a probability of another name."""

    def __init__(self, dim, chunks=4):
        super().__init__()
        self.n, self.width, self.p_attn = chunks, dim // chunks, 0.0
        self.to_qkv, self.merge = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, dim))

    def forward(self, hidden):
        B, L = hidden.shape[:2]
        q, k, v = (t.view(B, L, -1, self.width).transpose(1, 2) for t in self.to_qkv(hidden).chunk(3, dim=-1))
        w = F.dropout((q @ k.transpose(-2, -1) * self.width**-0.5).softmax(-1), self.p_attn, self.training)
        a = (w @ v + v * 0.5).transpose(1, 2).reshape(B, L, -1)
        hidden = hidden + self.merge(a)
        return hidden + self.ff(hidden)


class EinsumWeights(nn.Module):
    """Projections as parameters of the block itself."""

    def __init__(self, dim, heads=4):
        super().__init__()
        e = dim // heads
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(dim, heads, e) * 0.2) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, e, dim) * 0.2)
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        q, k, v = (torch.einsum("bsd,dhe->bhse", x, w) for w in (self.wq, self.wk, self.wv))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("bhse,hed->bsd", a, self.wo)
        return x + self.down(F.relu(self.up(x)))


class Gated(nn.Module):
    """A gate from the whole activation on cut features: one number a token, and one a head."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.H = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.token_gate, self.head_gate = nn.Linear(dim, 1), nn.Linear(dim, heads)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.H, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        a = a * torch.sigmoid(self.head_gate(x)).unsqueeze(-1)
        return x + self.o(a.flatten(2) * torch.sigmoid(self.token_gate(x)))


class Scaled(nn.Module):
    """Parameters of the block itself between cut regions, and in them."""

    def __init__(self, dim):
        super().__init__()
        self.gamma, self.inner = nn.Parameter(torch.rand(dim)), nn.Parameter(torch.rand(32))
        self.shift = nn.Parameter(torch.rand(()))
        self.up, self.down = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        return x + self.gamma * self.down(F.silu(self.up(x) * self.inner + self.shift))


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


class Mixed(nn.Module):
    """Blocks of two forms: in one of them there is nothing to cut."""

    def __init__(self, dim=16):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.layers = nn.ModuleList([Gated(dim), Pooled(dim), Scaled(dim), Pooled(dim)])

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Pooled(nn.Module):
    """A norm, a parameter of its own, and the mean over the whole sequence."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.pooled, self.scale = nn.LayerNorm(dim), RMSNorm(dim), nn.Parameter(torch.rand(dim))

    def forward(self, x):
        h = self.norm(x) * self.scale
        return x + h + self.pooled(h.mean(1, keepdim=True))


BLOCKS = {
    block.__name__: block
    for block in (
        GPTJ,
        MultiQuery,
        MultiQueryExpanded,
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
    )
}
STRANGERS = {name: (lambda block=block, **options: Model(block, **options)) for name, block in BLOCKS.items()} | {
    "Encoder": Encoder,
    "Translator": Translator,
    "T5": T5,
    "Mixed": Mixed,
    "TiedBias": TiedBias,
    "Convolutions": Convolutions,
}
