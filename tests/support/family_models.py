"""Plain models in the styles of their families, each with its own habits: fused projections, hard-coded sizes, ties."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from composer3d.models import llama

VOCAB = 12


class GPT2Attention(nn.Module):
    """Fused projections, and every size of the whole model written out."""

    def __init__(self, dim, num_heads, dropout):
        super().__init__()
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = num_heads, dim, dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class GPT2MLP(nn.Module):
    def __init__(self, dim, dropout):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class GPT2Block(nn.Module):
    def __init__(self, dim, num_heads, dropout):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), GPT2Attention(dim, num_heads, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(dim), GPT2MLP(dim, dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, dim=16, num_heads=4, num_layers=2, max_len=16, dropout=0.0, vocab=VOCAB):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(GPT2Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        pos = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class BertAttention(nn.Module):
    """Attention by hand, with a mask, a bias on every projection, and a norm after the residual."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_attention_heads, self.all_head_size = num_heads, dim
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dense, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)

    def heads(self, x):
        size = (*x.size()[:-1], self.num_attention_heads, -1)
        return x.view(size).permute(0, 2, 1, 3)

    def forward(self, hidden, mask):
        q, k, v = self.heads(self.query(hidden)), self.heads(self.key(hidden)), self.heads(self.value(hidden))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        out = (scores + mask).softmax(dim=-1) @ v
        out = out.permute(0, 2, 1, 3).contiguous()
        return self.norm(hidden + self.dense(out.view(*out.size()[:-2], self.all_head_size)))


class BertLayer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.attention = BertAttention(dim, num_heads)
        self.intermediate, self.output, self.norm = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.LayerNorm(dim)

    def forward(self, hidden, mask):
        hidden = self.attention(hidden, mask)
        return self.norm(hidden + self.output(F.gelu(self.intermediate(hidden))))


class Bert(nn.Module):
    """An encoder with a tied decoder that has a transform before it and a bias of its own."""

    def __init__(self, dim=16, num_heads=4, num_layers=2, max_len=16, vocab=VOCAB):
        super().__init__()
        self.word, self.position, self.kind = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim), nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim)
        self.layer = nn.ModuleList(BertLayer(dim, num_heads) for _ in range(num_layers))
        self.transform, self.transform_norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.decoder = nn.Linear(dim, vocab)
        self.decoder.weight = self.word.weight

    def forward(self, ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = (ids != 0).to(self.norm.weight.dtype)
        mask = (1.0 - attention_mask[:, None, None, :]) * -1e4
        x = self.word(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)) + self.kind(ids * 0)
        x = self.norm(x)
        for layer in self.layer:
            x = layer(x, mask)
        return self.decoder(self.transform_norm(F.gelu(self.transform(x))))


class ViTAttention(nn.Module):
    """Query, key and value as one dim of a reshape."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class ViTBlock(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), ViTAttention(dim, num_heads), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches by a convolution, a class token, positions as a parameter; 3 x 5 patches and the token are 16."""

    def __init__(self, dim=16, num_heads=4, num_layers=2, patch=4, size=(12, 20), num_classes=VOCAB):
        super().__init__()
        self.image_size = size
        self.patch_embed = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + size[0] // patch * (size[1] // patch), dim))
        self.blocks = nn.Sequential(*(ViTBlock(dim, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class MixerBlock(nn.Module):
    def __init__(self, num_tokens, dim, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_up, self.token_down = nn.Linear(num_tokens, hidden), nn.Linear(hidden, num_tokens)
        self.channel_up, self.channel_down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        y = self.token_down(F.gelu(self.token_up(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + y
        return x + self.channel_down(F.gelu(self.channel_up(self.norm2(x))))


class Mixer(nn.Module):
    """A plain MLP-Mixer over feature vectors: one pair of projections mixes tokens, the other channels."""

    def __init__(self, num_tokens=6, in_features=5, dim=16, hidden=24, num_layers=2, num_classes=VOCAB):
        super().__init__()
        self.stem = nn.Linear(in_features, dim)
        self.blocks = nn.ModuleList(MixerBlock(num_tokens, dim, hidden) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def small_llama(**options):
    sizes = {"dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "vocab_size": VOCAB, "ffn_dim": 24}
    return llama(**{**sizes, **options})


FAMILIES = {"llama": small_llama, "gpt2": GPT2, "bert": Bert, "vit": ViT, "mixer": Mixer}


def batch_of(family, num_samples=4, seed=3):
    """Return inputs and integer targets, padded where they are tokens; most take tokens."""
    generator = torch.Generator().manual_seed(seed)
    if family == "Vectors":
        inputs = torch.randn(num_samples, 8, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(0, VOCAB, (num_samples,), generator=generator)
    if family in ("vit", "mixer", "Convolutions", "ChannelsFirst"):
        shape = (6, 5) if family == "mixer" else (3, 12, 20)
        inputs = torch.randn(num_samples, *shape, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(0, VOCAB, (num_samples,), generator=generator)
    tokens = torch.randint(0, VOCAB, (num_samples, 9), generator=generator)
    targets = tokens[:, 1:].clone()
    for sample in range(num_samples):
        targets[sample, : sample % 3] = -100
    return tokens[:, :-1].contiguous(), targets


def class_loss(logits, targets):
    """Sum the cross-entropy of any number of leading dims; return it with the number of valid targets."""
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-100)
    return loss, (targets != -100).sum()
