"""A small decoder in plain PyTorch: nothing in it knows of ranks.

Shapes: B sequences, T tokens of each, D dimensions, H heads of K dimensions, V entries of the vocabulary.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTD):
        def heads(y_BTD):
            return y_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        q_BHTK, k_BHTK, v_BHTK = heads(self.query(x_BTD)), heads(self.key(x_BTD)), heads(self.value(x_BTD))
        y_BHTK = scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Model(nn.Module):
    def __init__(self, vocab_size, dim=64, num_layers=4, num_heads=4, max_seq_len=1024):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, dim)
        self.pos = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens_BT):
        x_BTD = self.tok(tokens_BT) + self.pos(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.out(self.norm(x_BTD))
