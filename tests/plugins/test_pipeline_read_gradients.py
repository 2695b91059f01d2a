"""Loops that read or change gradients between a pipeline's backwards and the optimizer's step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.mixtures import MixtureNet, Stacked, seeded
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
VOCAB = 11  # that of the mixtures
PIPELINE = "[mesh]\npp = 2\n{}[train]\nmicrobatch = 2\n[scheduling.pipeline]\n{}"
LAYOUTS = {
    "fsdp2": (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"),
    "pp": (2, PIPELINE.format("", "")),
    "pp, fsdp2": (4, PIPELINE.format("dp_shard = 2\n", '[sharding.fsdp2]\nignored = ["layers.*.bias"]\n')),
    "pp, ddp": (4, PIPELINE.format("dp_replicate = 2\n", "[sharding.ddp]\n")),
    "pp, offloaded optimizer": (2, PIPELINE.format("", '[sharding.cpu_offload]\nmode = "optimizer"\n')),
}
EXPERTS = PIPELINE.format("dp_shard = 2\nep = 2\n", "[sharding.fsdp2]\n[sharding.expert_parallel]\n")


class Tied(nn.Module):
    """The first stage and the last have the same weight."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, VOCAB, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.out(x)


class Unwrapped(MixtureNet):
    """Stacks and a router in one module, no unit's of which is the router."""

    def __init__(self):
        super().__init__(Stacked)


def loss_fn(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def clamp(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.clamp_(-2e-3, 2e-3)


def trained(backward, parameters, optimizer, batches, habit):
    """Train a step of some batches: gradients are clamped after each, after all, or never cleared."""
    for batch in batches:
        backward(*batch)
        if habit == "after each batch":
            clamp(parameters)
    if habit == "after a step's batches":
        clamp(parameters)
    optimizer.step()
    if habit != "never cleared":
        optimizer.zero_grad()


class OneDevice:
    """A step of one batch or two, whose gradient is the mean of theirs as far as they came."""

    def __init__(self, model):
        self._model, self.parameters, self.number = model, list(model.parameters()), 0

    def backward(self, tokens, targets):
        self.number += 1
        loss_fn(self._model(tokens), targets).backward()
        for parameter in self.parameters if self.number == 2 else ():
            parameter.grad /= 2


def beside_one_device(text, factory, habit):
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (2, 2, 2, 8, 5), generator=generator)
    steps = [[(batch[0], batch[1]) for batch in step] for step in tokens]
    if habit == "never cleared":
        steps = [[batch] for step in steps for batch in step]
    single = OneDevice(model := seeded(factory))
    plain = torch.optim.SGD(single.parameters, lr=1.0)
    for batches in steps:
        single.number = 0
        trained(single.backward, single.parameters, plain, batches, habit)
    expected = dict(model.named_parameters())
    example = (tokens[0, 0, 0, :1],), {}
    with composer3d.compose(seeded(factory), write_manifest(text), loss_fn=loss_fn, example=example) as run:
        size = 8 // run.context.data_parallel_degree
        own = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
        optimizer = run.optimizer(torch.optim.SGD, lr=1.0)
        mine = [parameter for _, parameter in run.named_parameters()]
        for number, batches in enumerate(steps):
            with run.step(number):
                trained(lambda x, y: run.forward_backward(x[own], target=y[own]), mine, optimizer, batches, habit)
        found = {fqn: run.full_tensor(fqn, parameter.detach()) for fqn, parameter in run.named_parameters()}
    return {fqn: float((value - expected[fqn].detach()).abs().max()) for fqn, value in found.items()}


HABITS = ("after a step's batches", "after each batch", "never cleared")


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize(
    "layout", [name if name == "pp" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_gradients_are_whole_after_a_batch(layout, habit):
    num_ranks, text = LAYOUTS[layout]
    for found in run_ranks(beside_one_device, num_ranks, text, Tied, habit):
        assert found and max(found.values()) < TIGHT, found


@pytest.mark.slow
@pytest.mark.parametrize("habit", HABITS)
def test_gradients_beside_experts_are_whole_after_a_batch(habit):
    for found in run_ranks(beside_one_device, 4, EXPERTS, Unwrapped, habit):
        assert found and max(found.values()) < TIGHT, found
