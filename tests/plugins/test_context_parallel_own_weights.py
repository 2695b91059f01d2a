"""Modules whose own code multiplies weights that tp shards, and mixes positions: cp gives them whole sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.sequence_models import DIM, Language
from support.sequence_steps import context, padded_batch, sequence_step
from torch import nn

from composer3d.testing import run_ranks


class Sums(nn.Module):
    """Sums over earlier positions between two products."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(DIM, 8) / 4), nn.Parameter(torch.randn(8, DIM) / 4)

    def forward(self, x_BSD):
        return (torch.tanh(x_BSD @ self.up).cumsum(1) / 5) @ self.down


class Summing(Language):
    def block(self):
        block = super().block()
        block["sums"] = Sums()
        return block

    def mixed(self, block, x, tokens):
        return super().mixed(block, x + block["sums"](x), tokens)

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_weights_of_modules_that_mix_positions_may_be_sharded():
    text = context(mesh="tp = 2", more="[sharding.tensor_parallel]\n")
    for loss, error, name, _ in run_ranks(sequence_step, 4, Summing, text, padded_batch):
        assert max(loss, error) <= 1e-12, name
