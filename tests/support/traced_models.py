"""Models that no straight pipeline can split: more than a hidden state passes between their blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.models import VOCAB, Block

DIM = 7


class Shared(nn.Module):
    """Every block is called twice, as in ALBERT; the head is the embedding, and the output a dict."""

    def __init__(self, num_layers=3, rounds=2):
        super().__init__()
        self.rounds = rounds
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(DIM) for _ in range(num_layers))
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, VOCAB, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens)
        for _ in range(self.rounds):
            for layer in self.layers:
                x = layer(x)
        return {"logits": self.out(self.norm(x)) + 0.0, "rounds": self.rounds}


class Angles(nn.Module):
    """No parameters: every stage computes them again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.linspace(0.1, 1.0, DIM), persistent=False)

    def forward(self, tokens):
        return torch.arange(tokens.shape[1]).unsqueeze(-1).to(self.steps.dtype) * self.steps


class Unet(nn.Module):
    """Early blocks feed late ones over skip connections; what mixes them stands between the blocks."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.angles = Angles()
        self.down = nn.ModuleList(Block(DIM) for _ in range(3))
        self.up = nn.ModuleList(Block(DIM) for _ in range(3))
        self.mix = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(3))
        self.gate = nn.Parameter(torch.full((DIM,), 0.5))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x, angles = self.tok(tokens), self.angles(tokens)
        skips = []
        for block in self.down:
            x = block(x + torch.sin(angles))
            skips.append(x)
            x = F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2) * self.gate
        for block, mix in zip(self.up, self.mix, strict=True):
            x = block(mix(torch.cat([x * torch.cos(angles), skips.pop()], dim=-1)))
        return self.out(x)


class Pair(Block):
    """Takes its input by keyword and returns a dict of two."""

    def __init__(self):
        super().__init__(DIM)

    def forward(self, *, hidden, beside=None):
        y = super().forward(hidden if beside is None else hidden + beside)
        return {"hidden": y, "kinds": ["pair"], "beside": torch.tanh(y)}


class Disorder(nn.Module):
    """Blocks in any order, by keyword; some outputs are used two blocks later, and one is not used."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Pair() for _ in range(4))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        a, b, c, d = self.layers
        x = first = self.tok(tokens)
        third = c(hidden=x)
        second = b(hidden=third["hidden"])
        x = second["hidden"] + 0.5 * first
        x += third["hidden"]  # in place, on what is its own
        fourth = d(hidden=x, beside=third["beside"])
        return self.out(a(hidden=fourth["hidden"] * second["beside"])["hidden"] + first) + 0.0


class Writing(nn.Module):
    """The forward writes over what a block returned, and uses it once more behind another block."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(DIM) for _ in range(4))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.layers[0](self.tok(tokens))
        x += 0.25
        y = self.layers[2](self.layers[1](x.clone()))
        x *= 1.5
        return self.out(self.layers[3](y) + x)


class Twins(nn.Module):
    """One block under four names, and two more."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        one = Block(DIM)
        self.layers = nn.ModuleList([one, Block(DIM), one, one, Block(DIM), one])
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


class HalfFrozen(Unet):
    """Of the U the named parameters do not learn."""

    def __init__(self, frozen):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
