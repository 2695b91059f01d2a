"""Penalties with constants of a parameter's shape, and of products of parameters, beside a mean: one device's steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, mine
from torch import nn

from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LAYOUTS = {
    "ddp bucketed": '[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n',
    "ddp": "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n",
    "fsdp2": "[sharding.fsdp2]\n",
    "tp": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
}


def elastic(model, importance, before):
    return 50 * sum((importance[n] * (p - before[n]).pow(2)).sum() for n, p in model.named_parameters())


def orthogonal(model, *_):
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    return 1e-2 * sum((w.T @ w - torch.eye(w.shape[1])).pow(2).sum() for w in weights)


def attenuated(model, *_):
    return 0.5 * sum(((p - p.detach() * 0.9).pow(2) * p.detach().abs()).sum() for p in model.parameters())


def trained(model, optimizer, backward, x, y, penalty):
    backward(F.mse_loss(model(x), y))
    importance = {name: p.grad.detach().clone().pow(2) for name, p in model.named_parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        term = penalty(model, importance, before)
        backward(F.mse_loss(model(x), y) + term)
        optimizer.step()


def errors(layout):
    torch.set_default_dtype(torch.float64)
    found = []
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0)).unbind()
    for penalty in (elastic, orthogonal, attenuated):
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        torch.manual_seed(0)
        run = composed(LAYOUTS[layout], model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        trained(reference, torch.optim.SGD(reference.parameters(), lr=0.1), lambda loss: loss.backward(), x, y, penalty)
        trained(run.model, optimizer, run.backward, mine(run, x), mine(run, y), penalty)
        pairs = zip(run.model.parameters(), reference.parameters(), strict=True)
        found.append(max(float((full(p.detach()) - own.detach()).abs().max()) for p, own in pairs))
        run.close()
    return found


@pytest.mark.parametrize(
    "layout", [each if each == "ddp bucketed" else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_penalties_with_constants_train_as_on_one_device(layout):
    for found in run_ranks(errors, 2, layout):
        assert max(found) < TIGHT, found
