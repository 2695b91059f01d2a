"""Models whose attention is written as other people write it, of every kind, for sequences that are sharded.

Torch's function is imported by several names, as code does.

Shapes: B batch, S queries, T keys, H heads, E head dim, D model dim, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as attend_fast

VOCAB, DIM, HEADS, LENGTH = 11, 16, 4, 16
ENDS = torch.tensor([5, 11])


class Language(nn.Module):
    """Two blocks between an embedding and a head; subclasses state what a block's attention does.

    Args:
        kv_heads: Heads of keys and values.
    """

    positions = "learned"

    def __init__(self, kv_heads=HEADS):
        super().__init__()
        self.kv_heads = kv_heads
        self.embedding, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.layers = nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def block(self):
        width = DIM // HEADS * self.kv_heads
        block = nn.ModuleDict({"q": nn.Linear(DIM, DIM), "kv": nn.Linear(DIM, 2 * width), "o": nn.Linear(DIM, DIM)})
        block["up"], block["norm"] = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        return block

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.layers:
            x = x + self.mixed(block, block["norm"](x), tokens)
            x = x + F.silu(block["up"](x))
        return self.head(x)

    def mixed(self, block, x, tokens):
        B, S, _ = x.shape
        q = block["q"](x).view(B, S, HEADS, -1).transpose(1, 2)
        k, v = block["kv"](x).view(B, S, 2, self.kv_heads, -1).permute(2, 0, 3, 1, 4)
        return block["o"](self.attend(q, k, v, tokens).transpose(1, 2).reshape(B, S, DIM))

    def attend(self, q, k, v, tokens):
        raise NotImplementedError


class Imported(Language):
    """Torch's function by the name under which it was imported."""

    def attend(self, q, k, v, tokens):
        return scaled_dot_product_attention(q, k, v, is_causal=True) + attend_fast(q, k, v)


class Kept(Language):
    """Torch's function as an attribute that the module keeps."""

    def __init__(self):
        super().__init__()
        self.kernel = F.scaled_dot_product_attention

    def attend(self, q, k, v, tokens):
        return self.kernel(q, k, v, is_causal=True, scale=0.3)


class ByHand(Language):
    """nanoGPT's slow path: softmax(q k / sqrt(E)) v with a registered triangle."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)

    def attend(self, q, k, v, tokens):
        S = q.size(2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :S, :S] == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ v


class Window(Language):
    """A sliding window as a boolean mask of positions."""

    def attend(self, q, k, v, tokens):
        at = torch.arange(q.shape[2], device=q.device)
        apart = at[:, None] - at
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart < 5))


class Documents(Language):
    """Packed documents, causal inside of each: a mask from the documents' ends."""

    def attend(self, q, k, v, tokens):
        at = torch.arange(q.shape[2], device=q.device)
        document = torch.bucketize(at, ENDS.to(q.device), right=True)
        mask = (document[:, None] == document) & (at[:, None] >= at)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class DocumentsByToken(Language):
    """Packed documents, as separators in the tokens say."""

    def attend(self, q, k, v, tokens):
        document_BS = (tokens == 1).cumsum(1)
        at = torch.arange(q.shape[2], device=q.device)
        mask = (document_BS[:, None, :, None] == document_BS[:, None, None, :]) & (at[:, None] >= at)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class PaddedHeadAndTail(Language):
    """Padding of head and tail by token id; a row that would see nothing sees itself."""

    def attend(self, q, k, v, tokens):
        valid = (tokens != 0)[:, None, None, :] | torch.eye(tokens.shape[1], dtype=torch.bool, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=valid)


class TrainedBias(Language):
    """A bias a head and a distance, with a gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(HEADS, 2 * LENGTH - 1))

    def attend(self, q, k, v, tokens):
        at = torch.arange(q.shape[2], device=q.device)
        bias = self.table[:, at[:, None] - at + LENGTH - 1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Alibi(Language):
    """Slopes in a buffer, added to scores."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.tensor([2.0 ** -(h + 1) for h in range(HEADS)]))

    def attend(self, q, k, v, tokens):
        at = torch.arange(q.shape[2], device=q.device)
        bias = -(at[:, None] - at).abs() * self.slopes[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(at > at[:, None], -torch.inf))


class Capped(Language):
    """Soft-capped scores by hand, with a causal mask."""

    def attend(self, q, k, v, tokens):
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.4
        scores = torch.tanh(scores / 2.0) * 2.0
        mask = torch.full((q.shape[2], q.shape[2]), float("-inf"), device=q.device).triu(1)
        return torch.matmul((scores + mask).softmax(-1), v)


class Grouped(Language):
    """Two heads of keys by torch's own option."""

    def __init__(self, kv_heads=2):
        super().__init__(kv_heads)

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class MultiQuery(Grouped):
    """One head of keys."""

    def __init__(self):
        super().__init__(1)


class Repeated(Grouped):
    """Two heads of keys, repeated by the code."""

    def attend(self, q, k, v, tokens):
        k, v = (x.repeat_interleave(HEADS // self.kv_heads, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Einsums(Language):
    """Attention as einsums over x_BSHE, a mask of -1e9 and einsum's implicit output."""

    def mixed(self, block, x, tokens):
        B, S, _ = x.shape
        q = block["q"](x).view(B, S, HEADS, -1)
        k, v = (y.view(B, S, HEADS, -1) for y in block["kv"](x).chunk(2, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        mask = torch.ones(S, S, dtype=torch.bool, device=x.device).tril()
        weights = torch.where(mask, scores, -1e9).softmax(dim=-1)
        return block["o"](torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, S, -1))


class Baddbmm(Language):
    """Products of three dims, as BLOOM's and fairseq's code writes them."""

    def attend(self, q, k, v, tokens):
        B, H, S, E = q.shape
        mask = torch.full((S, S), float("-inf"), device=q.device).triu(1).expand(B * H, S, S)
        flat = [x.reshape(B * H, S, E) for x in (q, k, v)]
        scores = torch.baddbmm(mask, flat[0], flat[1].transpose(1, 2), alpha=E**-0.5)
        return torch.bmm(scores.softmax(-1), flat[2]).view(B, H, S, E)


class Heads(Language):
    """nn.MultiheadAttention with masks of both forms, in the weights' and the fast form."""

    def block(self):
        block = super().block()
        block["heads"] = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        return block

    def mixed(self, block, x, tokens):
        S = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(S, device=x.device, dtype=x.dtype)
        fast, _ = block["heads"](x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        slow, _ = block["heads"](x, x, x, key_padding_mask=tokens == 0)
        return fast + slow


class SequenceFirst(Language):
    """nn.MultiheadAttention over x_SBD, in the middle of a model whose sequence is the second dim."""

    def block(self):
        block = super().block()
        block["heads"] = nn.MultiheadAttention(DIM, HEADS)
        return block

    def mixed(self, block, x, tokens):
        x = x.transpose(0, 1)
        return block["heads"](x, x, x, need_weights=False)[0].transpose(0, 1)


class Encoders(nn.Module):
    """nn.TransformerEncoder with a padding mask and a causal one."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


class Decoders(nn.Module):
    """nn.TransformerDecoder over a memory of another length, which an input states."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        layer = nn.TransformerDecoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, tokens):
        memory = self.embedding(tokens[:, :8])
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.decoder(self.embedding(tokens), memory, tgt_mask=mask, tgt_is_causal=True))


class TwoLengths(nn.Module):
    """An encoder over 24 tokens and a decoder over 16, both sharded: cross attention with two lengths."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.inner, self.cross = (nn.MultiheadAttention(DIM, HEADS, batch_first=True) for _ in range(2))

    def forward(self, input_ids, decoder_input_ids, attention_mask):
        memory, padding = self.embedding(input_ids), attention_mask == 0
        memory = memory + self.inner(memory, memory, memory, key_padding_mask=padding, need_weights=False)[0]
        x = self.embedding(decoder_input_ids)
        return self.head(x + self.cross(x, memory, memory, key_padding_mask=padding)[0])


class Rotated(Language):
    """Rotary positions from a buffer, as complex numbers."""

    def __init__(self):
        super().__init__(HEADS)
        E = DIM // HEADS
        angles = torch.outer(torch.arange(64.0), 100.0 ** (-torch.arange(0, E, 2).float() / E))
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def attend(self, q, k, v, tokens):
        freqs = self.freqs[: q.shape[2]]
        q, k = (
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * freqs).flatten(3)
            for x in (q, k)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class RotatedHalves(Language):
    """Rotary positions from cosines and sines made in the forward, halves turned."""

    def attend(self, q, k, v, tokens):
        E = q.shape[-1]
        at = torch.arange(q.shape[2], device=q.device, dtype=q.dtype)
        angles = at[:, None] * 100.0 ** (-torch.arange(0, E, 2, device=q.device, dtype=q.dtype) / E)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

        def turned(x):
            one, other = x[..., : E // 2], x[..., E // 2 :]
            return x * cos + torch.cat([-other, one], -1) * sin

        return F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)


LANGUAGES = {
    cls.__name__: cls
    for cls in (
        Imported, Kept, ByHand, Window, Documents, DocumentsByToken, PaddedHeadAndTail, TrainedBias, Alibi, Capped,
        Grouped, MultiQuery, Repeated, Einsums, Baddbmm, Heads, SequenceFirst, Encoders, Decoders,
        Rotated, RotatedHalves,
    )
}  # fmt: skip
