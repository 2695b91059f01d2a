"""A model with layers that float8 can and cannot multiply, and the plugin's table."""

from __future__ import annotations

import torch
from torch import nn

from composer3d import torch_compat
from support.models import VOCAB

# Before ranks are forked: each of them would import it anew, and what torchao imports when it converts, inductor's code
# generators, which takes longer than most of what is compared.
float8 = torch_compat.import_torchao("torchao.float8")
float8.convert_to_float8_training(nn.Linear(16, 16))

NUM_LAYERS, CONVERTED = 3, 3 * 2 * 16 * 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Wide(nn.Module):
    """Linear layers whose dims are multiples of 16, but for the last."""

    def __init__(self, tied=False):
        super().__init__()
        size = 16 if tied else VOCAB
        self.tok = nn.Embedding(size, 16)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, size, bias=not tied)
        if tied:
            self.out.weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x)) + 0.0


def table(recipe, more=""):
    return f'[precision.float8]\nrecipe = "{recipe}"\n{more}\n'
