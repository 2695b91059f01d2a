"""Models that are unusual, and right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.composition_faults import VOCAB, Even, Mlp

DIM = 8


class Unusual(nn.Module):
    """A token model around any blocks."""

    def __init__(self, *blocks):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(blocks)
        self.out = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


class Between(Unusual):
    """Modules without parameters before and behind the blocks, which every stage calls."""

    def __init__(self):
        super().__init__(*(Mlp(DIM) for _ in range(2)))
        self.out.weight = self.tok.weight
        self.drop, self.squash = nn.Dropout(0.1), nn.Tanh()

    def forward(self, tokens):
        x = self.drop(self.tok(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.out(self.squash(x)) + 0.0


class Experts(nn.Module):
    """A mixture that computes every expert on everything, and weighs two of four; some may get no token at all."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, DIM, DIM) / 3) for _ in range(2))

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(
            -1, chosen, shares / shares.sum(-1, keepdim=True)
        )
        each = torch.einsum("bsd,edf,efg->bseg", x, self.up, self.down).tanh()
        return x + torch.einsum("bseg,bse->bsg", each, weights)


class Window(nn.Module):
    """Grouped queries that see the last three positions, with dropout of the weights and of the keys."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.wq, self.wo = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.wk, self.wv = nn.Linear(DIM, DIM // 2, bias=False), nn.Linear(DIM, DIM // 2, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        at = torch.arange(x.shape[1])
        seen = (at[:, None] >= at) & (at[:, None] - at < 3)
        dropped = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, self.dropout(k), v, seen, dropped, enable_gqa=True)
        return x + self.wo(y.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """Convolves over the sequence, forwards only, with weights that are normed in every forward."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3)
        self.gain = nn.Parameter(torch.ones(DIM, 1, 1))

    def forward(self, x):
        weight = self.gain * F.normalize(self.conv.weight, dim=(1, 2))
        return x + F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), weight, self.conv.bias).transpose(1, 2)


class Recurrent(nn.Module):
    """Two layers of a recurrent net with dropout between them."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(DIM, DIM, num_layers=2, batch_first=True, dropout=0.3)

    def forward(self, x):
        return x + self.rnn(x)[0]


class Roll(nn.Module):
    """A block without parameters."""

    def forward(self, x):
        return x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class Hooked(Mlp):
    """Halves what comes back through it, on one device too."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 0.5 * grad)
        return y


class Counted(Even):
    """Counts its forwards, keeps a table of sines, and drops tokens."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("sines", torch.sin(torch.arange(4.0))[:, None], persistent=False)

    def forward(self, tokens):
        self.calls += 1
        x = F.dropout(self.tok(tokens), 0.1, self.training) + self.sines
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


class Halves(Unusual):
    """An embedding and a first block that are not trained."""

    def __init__(self):
        super().__init__(Mlp(DIM), Mlp(DIM))
        for part in (self.tok, self.layers[0]):
            part.requires_grad_(False)


def experts():
    return Unusual(Experts(), Experts())


def window():
    return Unusual(Window(0.2), Mlp(DIM), Window(0.2), Mlp(DIM))


def shared():
    block = Mlp(DIM)
    return Unusual(block, Mlp(DIM), block, Mlp(DIM))


def mixture():
    return Unusual(Convolution(), Roll(), Recurrent(), Roll())


def bare():
    return Unusual(Mlp(DIM), Roll(), Roll(), Mlp(DIM))


def hooked():
    return Unusual(Hooked(DIM), Hooked(DIM))


def narrow():
    model = Unusual(Mlp(DIM), Mlp(DIM))
    model.layers[1].to(torch.bfloat16)
    first = model.layers[1].forward
    model.layers[1].forward = lambda x: first(x.to(model.layers[1].up.weight.dtype)).to(x.dtype)
    return model
