"""Models that return a dataclass of their own, as code like Hugging Face's does: gradients equal one device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.models import Even, composed, full, mine, padded, reference_gradients, seeded, sum_loss

from composer3d.testing import run_ranks

LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\n",
    "ddp": '[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n',
    "tp": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
    "pipeline": "[train]\nmicrobatch = 3\n[mesh]\npp = 2\n[scheduling.pipeline]\n",
}


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] = ()


class Returning(Even):
    def forward(self, tokens):
        return Output(logits=super().forward(tokens))


def logits_loss(output, targets):
    return sum_loss(output.logits, targets)


def worst(text):
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    _, reference = reference_gradients(seeded(Even), tokens, targets)
    example = ((torch.zeros(3, 5, dtype=torch.int64, device="meta"),), {})
    run = composed(text, seeded(Returning), loss_fn=logits_loss, example=example)
    with run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
    found = {fqn: full(p.grad) for fqn, p in run.named_parameters()}
    run.close()
    return max(float((found[fqn] - reference[fqn]).abs().max()) for fqn in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_one_devices(layout):
    assert max(run_ranks(worst, 2, LAYOUTS[layout])) < 1e-12
