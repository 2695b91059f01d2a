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

# Beside the loss of the same forward.
BESIDE = {name: lambda model, output, compute=compute: 0.01 * compute(model) for name, compute in SAVED.items()} | {
    "outputs and a weight": lambda model, output: (output @ model[2].weight).square().mean(),
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


def followed(path, cases):
    """Train two steps by two backwards, of a loss and of what was computed beside it, as one device does."""
    torch.set_default_dtype(torch.float64)
    differences = []
    for compute in map(BESIDE.get, cases):
        model = make_model()
        single = copy.deepcopy(model)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, single)]
        x, y = torch.randn(8, 6), torch.randn(8, 4)
        with composer3d.compose(model, path) as run:
            wrapped, optimizer = run.prepare(model, optimizers[0])
            rank, size = run.context.data_parallel_rank, run.context.data_parallel_degree
            own = slice(rank * (8 // size), (rank + 1) * (8 // size))
            for _ in range(2):
                for net, begin, part in ((wrapped, run.backward, own), (single, torch.Tensor.backward, slice(8))):
                    output = net(x[part])
                    loss, beside = mse_loss(output, y[part]), compute(net, output)
                    begin(loss, retain_graph=True)
                    begin(beside)
                for each in (optimizer, optimizers[1]):
                    each.step()
                    each.zero_grad()
            expected = dict(single.named_parameters())
            found = {fqn: run.full_tensor(fqn, parameter.detach()) for fqn, parameter in run.named_parameters()}
            differences += [float((found[fqn] - expected[fqn].detach()).abs().max()) for fqn in found]
    return differences


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_second_backward_of_gathered_parameters_gathers_them_again(layout):
    num_ranks, text = LAYOUTS[layout]
    cases = [
        name for name in BESIDE if name in SAVED or "tp" not in layout
    ]  # a DTensor is multiplied by none of a loop
    for differences in run_ranks(followed, num_ranks, write_manifest(text), cases):
        assert differences and max(differences) < TIGHT


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_graph_of_gathered_parameters_that_are_freed_is_refused(layout):
    num_ranks, text = LAYOUTS[layout]
    for answers in run_ranks(late, num_ranks, write_manifest(text)):
        assert len(answers) == 2 * len(SAVED)
        assert all("run.backward(loss + penalty)" in answer and '"0.' in answer for answer in answers)
