"""Mixtures of experts whose loops read and write rows by masks or by indices of chosen positions.

Shapes: B batch, S positions, D model dim, N = B S tokens, E experts, K choices of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.family_models import VOCAB
from support.sequence_models import DIM

__all__ = ["WAYS", "Language", "Masked"]

NUM_EXPERTS, CHOICES = 4, 2


class Masked(nn.Module):
    """A gate and experts, whose results one of `WAYS` writes.

    Args:
        way: Its name.
    """

    def __init__(self, way):
        super().__init__()
        self.way, self.gate = way, nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 12), nn.GELU(), nn.Linear(12, DIM)) for _ in range(NUM_EXPERTS)
        )

    def forward(self, x_BSD):
        h_ND = x_BSD.view(-1, DIM)
        if self.way in OF_TOKENS:
            return OF_TOKENS[self.way](self, h_ND, *self.route(h_ND)).view(x_BSD.shape)
        return OF_POSITIONS[self.way](self, x_BSD, *self.route(x_BSD))

    def route(self, x):
        return F.softmax(self.gate(x), -1).topk(CHOICES, -1)

    def masks(self, chosen):
        """Yield expert, choice and mask."""
        for index, expert in enumerate(self.experts):
            for at in range(CHOICES):
                yield expert, at, chosen[..., at] == index

    def rows(self, chosen_NK):
        """Yield expert, tokens and choices of them."""
        for index, expert in enumerate(self.experts):
            yield expert, *torch.where(chosen_NK == index)


def add(self, x, weights, chosen):
    out = torch.zeros_like(x)
    for expert, at, mask in self.masks(chosen):
        out[mask] += expert(x[mask]) * weights[..., at][mask].unsqueeze(-1)
    return out


def set_over(self, x, weights, chosen):
    out = x * 0.5
    for expert, at, mask in self.masks(chosen):
        out[mask] = out[mask] * 0.5 + expert(x[mask]) * weights[..., at][mask].unsqueeze(-1)
    return out * 1.5


def set_empty(self, x, weights, chosen):
    out = torch.empty_like(x)
    for index, expert in enumerate(self.experts):
        mask = chosen[..., 0] == index
        out[mask] = expert(x[mask])
    return out * weights[..., :1]


def if_any(self, x, weights, chosen):
    out = x * 2
    for index, expert in enumerate(self.experts):
        mask = (chosen == index).any(-1)
        if mask.any():
            gates = torch.where(chosen == index, weights, torch.zeros_like(weights)).sum(-1)
            out[mask] += expert(x[mask]) * gates[mask].unsqueeze(-1)
    return out


def through_a_view(self, x_BSD, weights, chosen):
    out = torch.zeros_like(x_BSD)
    out_ND, h_ND = out.view(-1, DIM), x_BSD.view(-1, DIM)
    for expert, at, mask in self.masks(chosen.view(-1, CHOICES)):
        out_ND[mask] += expert(h_ND[mask]) * weights.view(-1, CHOICES)[mask, at, None]
    return out


def columns(self, x, weights, chosen):
    out = x * 0.5
    for expert, at, mask in self.masks(chosen):
        y = expert(x[mask]) * weights[..., at][mask].unsqueeze(-1)
        out[mask, :4] = y[:, :4]
        out[..., 4:][mask] += y[:, 4:]
    return out


def put(self, x, weights, chosen):
    out = x * 0.5
    for expert, at, mask in self.masks(chosen):
        out.index_put_((mask,), expert(x[mask]) * weights[..., at][mask].unsqueeze(-1), accumulate=True)
    return out


def put_apart(self, x, weights, chosen):
    out = x * 0.5
    for expert, at, mask in self.masks(chosen):
        out = out.index_put((mask,), expert(x[mask]) * weights[..., at][mask].unsqueeze(-1), accumulate=True)
    return out


def where(self, x, weights, chosen):
    out = torch.zeros_like(x)
    for expert, at, mask in self.masks(chosen):
        out = torch.where(mask.unsqueeze(-1), out + expert(x) * weights[..., at, None], out)
    return out


def scatter_rows(self, x, weights, chosen):
    out = x * 0.5
    for expert, at, mask in self.masks(chosen):
        out.masked_scatter_(mask.unsqueeze(-1), expert(x[mask]) * weights[..., at][mask].unsqueeze(-1))
    return out


def selected(self, x, weights, chosen):
    out = x * 0.5
    for expert, at, mask in self.masks(chosen):
        rows = x.masked_select(mask.unsqueeze(-1)).view(-1, DIM)
        out = out.masked_scatter(mask.unsqueeze(-1), expert(rows) * weights[..., at][mask].unsqueeze(-1))
    return out


def index_add(self, h_ND, weights_NK, chosen_NK):
    out = torch.zeros_like(h_ND)
    for expert, tokens, at in self.rows(chosen_NK):
        out.index_add_(0, tokens, expert(h_ND[tokens]) * weights_NK[tokens, at, None])
    return out


def index_add_apart(self, h_ND, weights_NK, chosen_NK):
    out = h_ND * 0.5
    for expert, tokens, at in self.rows(chosen_NK):
        out = out.index_add(0, tokens, expert(h_ND[tokens]) * weights_NK[tokens, at, None])
    return out


def index_copy(self, h_ND, weights_NK, chosen_NK):
    out = h_ND * 0.5
    for expert, tokens, at in self.rows(chosen_NK):
        out.index_copy_(0, tokens, expert(h_ND[tokens]) * weights_NK[tokens, at, None])
    return out


def nonzero(self, h_ND, weights_NK, chosen_NK):
    out = torch.zeros_like(h_ND)
    for expert, at, mask in self.masks(chosen_NK):
        tokens = mask.nonzero().squeeze(-1)
        out[tokens] = out[tokens] + expert(h_ND[tokens]) * weights_NK[tokens, at, None]
    return out


def scatter_add(self, h_ND, weights_NK, chosen_NK):
    out = h_ND * 0.5
    for expert, tokens, at in self.rows(chosen_NK):
        rows = expert(h_ND[tokens]) * weights_NK[tokens, at, None]
        out.scatter_add_(0, tokens[:, None].expand(-1, DIM), rows)
    return out


OF_POSITIONS = {
    each.__name__: each
    for each in (
        add, set_over, set_empty, if_any, through_a_view, columns, put, put_apart, where, scatter_rows, selected,
    )
}  # fmt: skip
OF_TOKENS = {
    **{f"{each.__name__} of tokens": each for each in (add, set_over, set_empty, if_any, columns, put, scatter_rows)},
    **{each.__name__: each for each in (index_add, index_add_apart, index_copy, nonzero, scatter_add)},
}
WAYS = (*OF_POSITIONS, *OF_TOKENS)


class Language(nn.Module):
    """Layers with such a mixture.

    Args:
        way: As of `Masked`.
    """

    def __init__(self, way):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Layer(way) for _ in range(2))

    def forward(self, tokens):
        x_BSD = self.embedding(tokens)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD)


class Layer(nn.Module):
    """Attention, and a mixture.

    Args:
        way: As of `Masked`.
    """

    def __init__(self, way):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.mixture = Masked(way)

    def forward(self, x_BSD):
        y_BSD = self.norm(x_BSD)
        q, k, v = (each(y_BSD).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x_BSD = x_BSD + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x_BSD + self.mixture(self.norm(x_BSD))
