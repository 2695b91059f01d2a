"""Backwards of a loop's own, of what it computed from parameters while a forward had gathered them."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.errors import StepError
from composer3d.testing import run_ranks

TIGHT = 1e-12
LAYOUTS = {
    "fsdp2": (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"),
    "one rank": (1, "[sharding.fsdp2]\n"),
    "ddp": (2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"),
    "fsdp2, tp": (4, "[mesh]\ndp_shard = 2\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n"),
}
SAVED = {
    "squares": lambda model: sum((p**2).sum() for p in model.parameters()),
    "a view": lambda model: model[0].weight.T.pow(2).sum(),
    "sums": lambda model: sum(p.sum() for p in model.parameters()),  # save nothing: the gradient would be lost
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def late(path):
    """Return what each backward after the step's was answered, and the difference of gradients from one device's."""
    torch.set_default_dtype(torch.float64)
    model = make_model()
    single = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 4)
    backward, grad = torch.autograd.backward, torch.autograd.grad
    answers = []
    with composer3d.compose(model, path, loss_fn=mse_loss) as run:
        rank, size = run.context.data_parallel_rank, run.context.data_parallel_degree
        own = slice(rank * (8 // size), (rank + 1) * (8 // size))
        for compute in SAVED.values():
            loss = mse_loss(run.model(x[own]), y[own])
            gathered, penalty = list(run.model.parameters()), compute(run.model)
            run.backward(loss)
            for begin in (penalty.backward, lambda a=penalty, b=gathered: torch.autograd.grad(a, b[0])):
                with pytest.raises(StepError) as refusal:
                    begin()
                answers.append(str(refusal.value))
            weight = torch.ones(3, requires_grad=True)
            (weight * 2).sum().backward()  # another graph's
            assert weight.grad.tolist() == [2.0] * 3
            compute(run.model).backward()
            single.zero_grad()
            (mse_loss(single(x), y) + compute(single)).backward()
            expected = dict(single.named_parameters())
            for fqn, parameter in run.named_parameters():
                found = run.full_tensor(fqn, parameter.grad.detach())
                torch.testing.assert_close(found, expected[fqn].grad, rtol=TIGHT, atol=TIGHT)
            run.model.zero_grad()
    assert (torch.autograd.backward, torch.autograd.grad) == (backward, grad)
    return answers


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_graph_of_gathered_parameters_that_are_freed_is_refused(layout):
    num_ranks, text = LAYOUTS[layout]
    for answers in run_ranks(late, num_ranks, write_manifest(text)):
        assert len(answers) == 2 * len(SAVED)
        assert all("run.backward(loss + penalty)" in answer and '"0.' in answer for answer in answers)
