"""Parameters of two dtypes in one unit: torch gathers and reduces a unit as one, so that each dtype gets its own."""

from __future__ import annotations

import pytest
import torch
from support.models import mine, padded, write_manifest
from torch import nn
from torch.distributed.tensor import DTensor

import composer3d
from composer3d.testing import count_collectives, full, run_ranks

TIGHT, ROUNDED = 1e-12, 4 * torch.finfo(torch.float32).eps


class Gain(nn.Module):
    """A float32 weight used in float64, so that nothing but its own gradient is rounded."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim, dtype=torch.float32))

    def forward(self, x):
        return x * self.weight.to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gain, self.up, self.down = Gain(dim), nn.Linear(dim, 9), nn.Linear(9, dim)
        # Of another dtype than a parameter of the same module.
        self.scale, self.shift = nn.Parameter(torch.rand(dim, dtype=torch.float32)), nn.Parameter(torch.rand(dim))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.gain(x)))) * self.scale.to(x.dtype) + self.shift


class TwoDtypes(nn.Module):
    def __init__(self, dim=7):
        super().__init__()
        self.tok, self.out = nn.Embedding(11, dim), nn.Linear(dim, 11)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm = Gain(dim)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x)) + 0.0


def loss_of(logits, targets):
    summed = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return summed, (targets != -100).sum()


def made():
    torch.manual_seed(0)
    return TwoDtypes()


def step(text):
    """Return the largest errors of float64 and of float32 gradients, what stays whole, and what is sent."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    reference = made()
    loss, count = loss_of(reference(tokens), targets)
    (loss / count).backward()
    run = composer3d.compose(made(), write_manifest(text), loss_fn=loss_of)
    with run.step(0), count_collectives(run.mesh) as collectives:
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        run.clip_grad_norm_(float("inf"))
    counted = {key: count for key, (count, _) in collectives.summary().items()}
    errors = {torch.float64: 0.0, torch.float32: 0.0}
    parameters = dict(run.named_parameters())
    for name, expected in reference.named_parameters():
        found = full(parameters[name].grad)
        assert found.dtype == expected.dtype
        error = float((found - expected.grad).abs().max() / expected.grad.abs().max())
        errors[found.dtype] = max(errors[found.dtype], error)
    whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    run.close()
    return errors[torch.float64], errors[torch.float32], whole, counted


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_each_dtype_has_units_of_its_own(zero):
    for exact, rounded, whole, counted in run_ranks(step, 2, f"[sharding.fsdp2]\nzero = {zero}\n"):
        assert exact < TIGHT
        assert rounded < ROUNDED
        assert whole == ["layers.0.scale", "layers.1.scale"]
        # The root, two blocks, and the gains of those three.
        assert counted["reduce_scatter", "dp_shard"] == 6


def test_hybrid_sharding():
    for exact, rounded, *_ in run_ranks(step, 4, "[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\n"):
        assert exact < TIGHT
        assert rounded < ROUNDED


def test_replicas():
    for exact, rounded, whole, _ in run_ranks(step, 2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"):
        assert exact < TIGHT
        assert rounded < ROUNDED
        assert whole == ["layers.0.scale", "layers.1.scale"]
