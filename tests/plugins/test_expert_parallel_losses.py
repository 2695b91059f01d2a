"""Losses of routers, over a micro-batch and over each sequence: one device's where cp or tp share its tokens."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import shipped, token_sum, tokens_and_targets
from support.models import largest, seeded, write_manifest

import composer3d
from composer3d.testing import full, run_ranks

EP = "[sharding.fsdp2]\n[sharding.expert_parallel]\n"
LAYOUTS = {
    "context": (2, f"[mesh]\ncp = 2\nep = 2\n{EP}[sharding.context_parallel]\n"),
    "tensor": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"),
    "sequence": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n"),
    "five dimensions": (
        4,
        f"[mesh]\ncp = 2\ntp = 2\nep = 4\n{EP}[sharding.context_parallel]\n[sharding.tensor_parallel]\n",
    ),
    "sharded twice": (
        4,
        f"[mesh]\ncp = 2\ntp = 2\nep = 2\n{EP}[sharding.context_parallel]\n[sharding.tensor_parallel]\n"
        "sequence_parallel = true\n",
    ),
}


def errors(text):
    """Return the error of the loss and the largest of gradients, relative to the largest gradient, over each."""
    torch.set_default_dtype(torch.float64)
    return {balance: _errors(balance, text) for balance in ("microbatch", "sequence")}


def _errors(balance, text):

    def factory():
        return shipped(balance=balance, balance_loss=0.5, z_loss=0.1, num_heads=4)

    tokens, targets = tokens_and_targets(num_sequences=3, seq_len=8)
    reference = seeded(factory)
    parts = token_sum(reference(tokens), targets)
    (parts.sum / parts.count + parts.auxiliary).backward()
    assert float(parts.auxiliary.detach()) > 0.5  # 0.5 a layer where routing is even
    with composer3d.compose(seeded(factory), write_manifest(text), loss_fn=token_sum) as run, run.step(0):
        loss = run.forward_backward(tokens, target=targets)
        wanted = {fqn: p.grad for fqn, p in reference.named_parameters()}
        scale = largest(float(gradient.abs().max()) for gradient in wanted.values())
        off = largest(float((full(p.grad) - wanted[fqn]).abs().max()) / scale for fqn, p in run.named_parameters())
    return float((loss - (parts.sum / parts.count).detach()).abs()), off


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_routers_are_those_of_one_device(layout):
    world_size, text = LAYOUTS[layout]
    for found in run_ranks(errors, world_size, text):
        for balance, (loss, gradients) in found.items():
            assert max(loss, gradients) <= 1e-12, balance
