"""Context parallelism: a decoder's own sequence, which the inputs do not shard, beside an encoder's that they do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import seeded, write_manifest
from torch import nn

import composer3d
from composer3d.testing import run_ranks

VOCAB, DIM = 11, 8


class Attending(nn.Module):
    """Attention to its own sequence, and to another if it is given one."""

    def __init__(self):
        super().__init__()
        self.own, self.other = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x_BSD, memory_BTD=None):
        q, k, v = (each.unsqueeze(1) for each in self.own(x_BSD).chunk(3, -1))
        x_BSD = x_BSD + F.scaled_dot_product_attention(q, k, v, is_causal=memory_BTD is not None).squeeze(1)
        if memory_BTD is None:
            return x_BSD
        memory = memory_BTD.unsqueeze(1)
        q = self.other(x_BSD).unsqueeze(1)
        return x_BSD + F.scaled_dot_product_attention(q, memory, memory).squeeze(1)


class Translating(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.encoder = nn.ModuleList(Attending() for _ in range(2))
        self.decoder = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, src, tgt):
        memory, x = self.embedding(src), self.embedding(tgt)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_of(num_source, num_target):
    tokens = torch.randint(0, VOCAB, (2, num_source + 2 * num_target), generator=torch.Generator().manual_seed(1))
    return tuple(each.contiguous() for each in tokens.split([num_source, num_target, num_target], 1))


def step(num_source, num_target):
    """Return the greatest error of the loss and the gradients of a step, and the number of valid tokens."""
    torch.set_default_dtype(torch.float64)
    src, tgt, target = batch_of(num_source, num_target)
    model = seeded(Translating)
    wanted = loss_fn(model(src, tgt), target)
    wanted.backward()
    text = "[mesh]\ncp = 2\n[sharding.context_parallel]\n[sharding.ddp]\n"
    run = composer3d.compose(seeded(Translating), write_manifest(text), loss_fn=loss_fn, example=((src, tgt), {}))
    with run.step(0) as state:
        loss = run.forward_backward(src, tgt, target=target)
        run.clip_grad_norm_(float("inf"))
    found = {fqn: parameter.grad for fqn, parameter in run.named_parameters()}
    used = [(fqn, parameter.grad) for fqn, parameter in model.named_parameters() if parameter.grad is not None]
    error = max(float((found[fqn] - gradient).abs().max()) for fqn, gradient in used)
    run.close()
    return max(error, float((loss - wanted.detach()).abs())), state.count


@pytest.mark.parametrize(("num_source", "num_target"), [(12, 8), (8, 8), (8, 6), (12, 6)])
def test_a_decoder_takes_its_own_sequence_whole(num_source, num_target):
    for error, count in run_ranks(step, 2, num_source, num_target):
        assert error <= 1e-12
        assert count == 2 * num_target
