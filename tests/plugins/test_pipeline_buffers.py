"""Buffers of a pipeline's stages, as a loop reads them."""

from __future__ import annotations

import pytest
import torch
from support.models import Net, composed, padded

from composer3d.testing import run_ranks


class Counting(Net):
    """Blocks that keep a running mean of what they are given."""

    def __init__(self):
        super().__init__(num_layers=4)
        for layer in self.layers:
            layer.register_buffer("seen", torch.zeros(()))
            layer.register_forward_pre_hook(self.look)

    @staticmethod
    def look(module, args):
        module.seen.add_(args[0].detach().mean())


def counted():
    mesh = f"[mesh]\npp = {torch.distributed.get_world_size()}\n"
    run = composed(f"{mesh}[train]\nmicrobatch = 2\n[scheduling.pipeline]\n", Counting)
    tokens, targets = padded()
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    values = {fqn: buffer.clone() for fqn, buffer in run.named_buffers()}
    run.close()
    return values


def test_a_loop_reads_the_buffers_of_its_stages():
    first, second = run_ranks(counted, 2)
    assert [set(first), set(second)] == [{f"layers.{n}.seen" for n in pair} for pair in ((0, 1), (2, 3))]
    (alone,) = run_ranks(counted, 1)
    assert {fqn: float(value) for fqn, value in (first | second).items()} == pytest.approx(
        {fqn: float(value) for fqn, value in alone.items()}
    )
