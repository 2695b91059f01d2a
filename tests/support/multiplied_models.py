"""Models whose projections are parameters that their own code multiplies, as code translated from JAX has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.models import VOCAB

DIM, HEADS, HEAD = 16, 4, 6


def drawn(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


class EinsumAttention(nn.Module):
    """Query, key and value of shape (H, D, E), the output of (H, E, D), and a bias a head."""

    def __init__(self):
        super().__init__()
        self.w_q, self.w_k, self.w_v = drawn(HEADS, DIM, HEAD), drawn(HEADS, DIM, HEAD), drawn(HEADS, DIM, HEAD)
        self.w_o, self.bias = drawn(HEADS, HEAD, DIM), drawn(HEADS, 1, HEAD)

    def forward(self, x):
        q, k, v = (torch.einsum("bsd,hde->bhse", x, w) for w in (self.w_q, self.w_k, self.w_v))
        scores = torch.einsum("bhse,bhte->bhst", q + self.bias, k) * HEAD**-0.5
        return torch.einsum("bhse,hed->bsd", scores.softmax(-1) @ v, self.w_o)


class FusedAttention(nn.Module):
    """One matrix of query, key and value, whose result the code takes apart; heads are flattened before the last."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = drawn(DIM, 3 * DIM), drawn(DIM, DIM)

    def forward(self, x):
        B, S, D = x.shape
        q, k, v = (x @ self.qkv).chunk(3, dim=-1)
        q, k, v = (t.reshape(B, S, HEADS, D // HEADS).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("...f,fd->...d", y.transpose(1, 2).reshape(B, S, D), self.out)


class Gated(nn.Module):
    """Two weights that meet in a product, and one that is used transposed."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = drawn(DIM, 24), drawn(DIM, 24), drawn(DIM, 24)

    def forward(self, x):
        return (F.silu(x @ self.w1) * (x @ self.w3)) @ self.w2.T


class Functional(nn.Module):
    """F.linear with biases, of which one is sharded's and one is added once."""

    def __init__(self):
        super().__init__()
        self.up, self.up_bias, self.down, self.down_bias = drawn(32, DIM), drawn(32), drawn(DIM, 32), drawn(DIM)

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.up, self.up_bias)), self.down, bias=self.down_bias)


class Layers(nn.Module):
    """A block whose own parameters are of both kinds, beside a linear pair and a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 24), nn.Linear(24, DIM)
        self.first, self.second = drawn(DIM, 24), drawn(24, DIM)

    def forward(self, x):
        y = self.norm(x)
        return self.down(torch.tanh(self.up(y))) + torch.tanh(y @ self.first) @ self.second


class Fed(nn.Module):
    """A layer that sums over what a parameter has sharded, beside another parameter, as in KANs."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.layer = drawn(DIM, 24), drawn(24, DIM), nn.Linear(24, DIM)

    def forward(self, x):
        y = torch.tanh(x @ self.first)
        return torch.einsum("...f,fd->...d", y, self.second) + self.layer(F.silu(y))


class Listed(nn.Module):
    """Parameters in a list and in dictionaries of lists."""

    def __init__(self):
        super().__init__()
        self.pair = nn.ParameterList([drawn(DIM, 32), drawn(32, DIM)])
        self.heads = nn.ModuleDict({name: nn.ParameterList([drawn(DIM, 8), drawn(8, DIM)]) for name in "ab"})
        self.named = nn.ParameterDict({"up": drawn(DIM, 24), "shift": drawn(24), "down": drawn(24, DIM)})

    def forward(self, x):
        y = torch.tanh(x @ self.pair[0]) @ self.pair[1]
        y = y + torch.tanh(x @ self.named["up"] + self.named["shift"]) @ self.named["down"]
        return y + sum(torch.relu(x @ up) @ down for up, down in self.heads.values())


class Contracted(nn.Module):
    """tensordot, addmm, einsum of several tensors, and einsum that leaves its result to torch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.bias = drawn(DIM, 24), drawn(24, DIM), drawn(24)
        self.third, self.fourth, self.fifth = drawn(DIM, 8), drawn(8, DIM), drawn(DIM, 12)
        self.sixth, self.seventh, self.eighth = drawn(12, DIM), drawn(DIM, 16), drawn(16, DIM)

    def forward(self, x):
        y = torch.tensordot(F.gelu(torch.tensordot(x, self.first, dims=1)), self.second, dims=([2], [0]))
        y = y + torch.einsum("bsd,df,...fe->bse", x, self.third, self.fourth)
        y = y + torch.einsum("...f,fe", torch.tanh(torch.einsum("...d,df", x, self.fifth)), self.sixth)
        flat = torch.addmm(self.bias[:16], x.flatten(0, 1), self.seventh, alpha=0.5)
        return y + torch.mm(flat.relu(), self.eighth).view_as(x)


class Multiplied(nn.Module):
    """Blocks of one of the above kinds; tokens are looked up in a parameter, whose transposed gives the logits."""

    def __init__(self, *kinds):
        super().__init__()
        self.table = drawn(VOCAB, DIM)
        self.layers = nn.ModuleList(Residual(kinds) for _ in range(2))

    def forward(self, tokens):
        x = self.table[tokens]
        for layer in self.layers:
            x = layer(x)
        return x @ self.table.T


class Residual(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.parts = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x):
        for part in self.parts:
            x = x + part(F.rms_norm(x, (DIM,), self.scale))
        return x


class Flat(nn.Module):
    """No list of blocks at all."""

    def __init__(self):
        super().__init__()
        self.table, self.mlp, self.attention = drawn(VOCAB, DIM), Gated(), EinsumAttention()

    def forward(self, tokens):
        x = self.table[tokens]
        return (x + self.attention(x) + self.mlp(x)) @ self.table.T


class Lent(nn.Module):
    """Parameters that several blocks have as their own."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(Layers() for _ in range(2))
        self.layers[1].first, self.layers[1].second = self.layers[0].first, self.layers[0].second

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x


KINDS = (EinsumAttention, FusedAttention, Gated, Functional, Layers, Fed, Listed, Contracted)
MODELS = {f"Multiplied{kind.__name__}": (lambda kind=kind: Multiplied(kind)) for kind in KINDS} | {
    "MultipliedBoth": lambda: Multiplied(EinsumAttention, Gated),
    "MultipliedFlat": Flat,
}
