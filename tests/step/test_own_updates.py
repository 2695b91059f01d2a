"""Loops that update parameters themselves, from the gradients that backwards leave."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\n",
    "ddp": "[sharding.ddp]\n[mesh]\ndp_replicate = -1\n",
    "tp": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
}


class Temperature(nn.Module):
    """A parameter without dims, which no unit holds."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.factor


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4), Temperature())


def cleared(model, how):
    """Clear gradients as a loop does without an optimizer."""
    for parameter in model.parameters() if how != "zero_grad" else ():
        if how == "None":
            parameter.grad = None
        else:
            parameter.grad.zero_()
    if how == "zero_grad":
        model.zero_grad()


def updated(model, backward, batches, how, part=slice(None)):
    """Train with updates of the loop's own; in the last batch two losses' gradients are taken one after the other."""
    for x, y in batches:
        backward(F.mse_loss(model(x[part]), y[part]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        cleared(model, how)
    x, y = batches[-1]
    backward(F.mse_loss(model(x[part]), y[part]))
    first = [parameter.grad.clone() for parameter in model.parameters()]
    cleared(model, how)
    backward(model(x[part]).square().mean())
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), first, strict=True):
            parameter.sub_(0.1 * gradient + 0.2 * parameter.grad)
    cleared(model, how)


def error(path, how):
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 5, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(3)]
    model = make_model()
    reference = copy.deepcopy(model)
    updated(reference, lambda loss: loss.backward(), batches, how)
    run = composer3d.compose(model, path)
    size = 8 // run.context.data_parallel_degree
    mine = slice(size * run.context.data_parallel_rank, size * (run.context.data_parallel_rank + 1))

    updated(run.model, run.backward, batches, how, mine)
    found = {fqn: full(p.detach()) for fqn, p in run.named_parameters()}
    run.close()
    wanted = dict(reference.named_parameters())
    return max(float((found[fqn] - wanted[fqn].detach()).abs().max()) for fqn in wanted)


def test_an_update_of_the_loops_own_ends_its_step():
    assert max(run_ranks(error, 2, write_manifest(LAYOUTS["fsdp2"]), "None")) <= TIGHT


@pytest.mark.slow
@pytest.mark.parametrize("how", ["None", "zeros", "zero_grad"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_to_clear_gradients_ends_a_step(layout, how):
    assert max(run_ranks(error, 2, write_manifest(LAYOUTS[layout]), how)) <= TIGHT


def accumulated():
    """Return how far a sum over backwards is from one device's, whose gradients the loop scales in between."""
    torch.set_default_dtype(torch.float64)
    run = composer3d.compose(make_model(), write_manifest(LAYOUTS["fsdp2"]))
    reference, x = make_model(), torch.randn(8, 5)
    mine = slice(4 * run.context.data_parallel_rank, 4 * run.context.data_parallel_rank + 4)
    for part in (x, 2 * x):
        (reference(part).square().mean() / 2).backward()
        run.backward(run.model(part[mine]).square().mean() / 2)
        for model in (reference, run.model):
            for parameter in model.parameters():
                parameter.grad.mul_(3.0)
    wanted = dict(reference.named_parameters())
    found = max(float((full(p.grad) - wanted[fqn].grad).abs().max()) for fqn, p in run.named_parameters())
    run.close()
    return found


def test_gradients_that_a_loop_changes_are_added_to():
    assert max(run_ranks(accumulated, 2)) <= TIGHT
