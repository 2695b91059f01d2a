"""Pipelines of models of numbers: a precision casts them on stages that hold none of the weights they meet."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, seeded
from torch import nn

from composer3d.testing import run_ranks

EXAMPLE = ((torch.zeros(2, 3, 16, 16),), {})


class Patches(nn.Module):
    """Patches of images, a class token, positions, blocks, and a head: as vision transformers begin and end."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        hidden = self.emb(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(len(hidden), -1, -1), hidden], 1) + self.positions
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden[:, 0])


class Rows(nn.Module):
    """A projection of rows of numbers, without a bias, before blocks."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(48, 16, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        hidden = self.project(images.flatten(1)[:, :48])
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def summed(output, target):
    return F.cross_entropy(output.float(), target, reduction="sum"), target.numel()


def losses_of(text, factory):
    run = composed(f"{text}\n[train]\nmicrobatch = 2\n", seeded(factory), loss_fn=summed, example=EXAMPLE)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    losses = []
    for number in range(4):
        with run.step(number):
            losses.append(float(run.forward_backward(images, target=torch.arange(8) % 5)))
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return losses


@pytest.mark.parametrize("precision", ["[precision.mixed]\n", '[precision.mixed]\nparam_dtype = "float16"\n'])
@pytest.mark.parametrize("factory", [Patches, Rows])
@pytest.mark.parametrize("sharding", ["", "[sharding.fsdp2]\n"], ids=["by itself", "fsdp2"])
def test_inputs_that_are_cast_meet_weights_of_other_stages(sharding, factory, precision):
    text = f"{sharding}{precision}"
    (alone,) = run_ranks(losses_of, 1, text, factory)
    assert alone[-1] < 0.9 * alone[0]
    for losses in run_ranks(losses_of, 2, f"[mesh]\npp = 2\n[scheduling.pipeline]\n{text}", factory):
        assert losses == pytest.approx(alone, rel=2e-3)
