"""Dropout on what tensor parallelism shards: each rank's share of the numbers that one rank draws."""

from __future__ import annotations

import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import cross_entropy

import composer3d
from composer3d.testing import run_ranks


class Block(nn.Module):
    """An MLP whose dropout stands between its sharded layers, and one outside of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.2)
        self.mix = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))

    def forward(self, x):
        return x + self.dropout(self.mix(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.tok(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def gradients(path):
    """Return loss and gradients of one step."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    tokens = torch.randint(16, (4, 6))
    run = composer3d.compose(Model(), path)
    run.optimizer(torch.optim.SGD, lr=0.1)
    loss = run.backward(cross_entropy(run.model(tokens).flatten(0, 1), tokens.roll(1).flatten()))
    found = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters()}
    run.close()
    return {"loss": loss, **found}


def test_dropout_between_sharded_layers_drops_what_it_drops_on_one_rank():
    (expected,) = run_ranks(gradients, 1, write_manifest("[sharding.ddp]\n"))
    for found in run_ranks(gradients, 2, write_manifest("[mesh]\ntp = 2\n[sharding.tensor_parallel]\n")):
        for fqn, value in expected.items():
            torch.testing.assert_close(found[fqn], value, rtol=1e-10, atol=1e-12)
