"""Losses made of gradients of parameters: Hessians times vectors, penalties, and products of two losses' gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d import StepError
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LAYOUTS = {
    "zero 3": (2, "[sharding.fsdp2]\n"),
    "zero 2": (2, "[sharding.fsdp2]\nzero = 2\n"),
    "zero 1": (2, "[sharding.fsdp2]\nzero = 1\n"),
    "hybrid": (4, "[sharding.fsdp2]\n[mesh]\ndp_replicate = 2\n"),
    "unit": (2, "[sharding.ddp]\n[mesh]\ndp_replicate = 2\n"),
}
ASKED = "torch.autograd.grad was asked for gradients of parameters, which are those of this rank's samples alone"


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        h = self.enter(x).tanh()
        for layer in self.layers:
            h = h + layer(h)
        return self.leave(h)


def reference_grad(model):
    def grad(loss, **options):
        names, parameters = zip(*model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters, **options), strict=True))

    return grad


def mean_over(model, x, y):
    return F.cross_entropy(model(x), y)


def penalised(model, grad, x, y):
    """A mean beside the squared norm of its gradient."""
    loss = mean_over(model, x, y)
    return loss + 0.1 * sum(each.pow(2).sum() for each in grad(loss, create_graph=True).values())


def penalty_alone(model, grad, x, y):
    return sum(each.pow(2).sum() for each in grad(mean_over(model, x, y), create_graph=True).values())


def agreement(model, grad, x, y):
    """The product of two losses' gradients."""
    output = model(x)
    first = grad(F.cross_entropy(output, y), create_graph=True)
    second = grad(output.square().mean(), create_graph=True)
    return F.cross_entropy(output, y) - 0.1 * sum((first[fqn] * second[fqn]).sum() for fqn in first)


def curvature(model, grad, x, y):
    """The Hessian times a vector, twice."""
    once = grad(mean_over(model, x, y), create_graph=True)
    product = grad(sum(each.sum() for each in once.values()), create_graph=True)
    return mean_over(model, x, y) + 0.01 * sum(each.pow(2).sum() for each in product.values())


OBJECTIVES = {each.__name__: each for each in (penalised, penalty_alone, agreement, curvature)}


def batch_of(num_ranks, *, is_even):
    """Return samples of which ranks have as many valid targets, or each another number."""
    generator = torch.Generator().manual_seed(5)
    x, y = (
        torch.randn(4 * num_ranks, 5, generator=generator),
        torch.randint(0, 3, (4 * num_ranks,), generator=generator),
    )
    y[slice(0, None, 4) if is_even else slice(0, 3)] = -100
    return x, y


def errors(path, names, num_ranks):
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        torch.manual_seed(0)
        model = Net()
        reference, (x, y) = copy.deepcopy(model), batch_of(num_ranks, is_even=name != "penalty_alone")
        OBJECTIVES[name](reference, reference_grad(reference), x, y).backward()
        run = composer3d.compose(model, path)
        run.optimizer(torch.optim.SGD, lr=0.1)
        mine = slice(4 * run.context.data_parallel_rank, 4 * run.context.data_parallel_rank + 4)
        with run.step(0):
            run.backward(OBJECTIVES[name](run.model, run.grad, x[mine], y[mine]))
            run.clip_grad_norm_(float("inf"))
            gradients = {fqn: full(p.grad) for fqn, p in run.named_parameters()}
        run.close()
        wanted = {fqn: p.grad for fqn, p in reference.named_parameters()}
        found[name] = max(float((gradients[fqn] - wanted[fqn]).abs().max()) for fqn in wanted)
    return found


def test_losses_of_gradients_are_one_devices():
    for found in run_ranks(errors, 2, write_manifest(LAYOUTS["zero 3"][1]), ["penalised"], 2):
        assert max(found.values()) <= TIGHT, found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_of_gradients_is_one_devices(layout):
    num_ranks, text = LAYOUTS[layout]
    for found in run_ranks(errors, num_ranks, write_manifest(text), list(OBJECTIVES), num_ranks):
        assert max(found.values()) <= TIGHT, found


def refused(path):
    """Return what is said to a rank's own gradients, and whether they can be had where they are meant."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    run = composer3d.compose(Net(), path)
    rank, (x, y) = run.context.data_parallel_rank, batch_of(2, is_even=False)
    mine = slice(4 * rank, 4 * rank + 4)
    loss, said = mean_over(run.model, x[mine], y[mine]), []
    for create_graph in (False, True):
        with pytest.raises(StepError) as caught:
            torch.autograd.grad(loss, list(run.model.parameters()), create_graph=create_graph, retain_graph=True)
        said.append(str(caught.value))
    with run.rank_gradients():
        own = torch.autograd.grad(loss, list(run.model.parameters()), retain_graph=True)
    whole = run.grad(loss, retain_graph=True)
    moved = x[mine].clone().requires_grad_()
    (of_inputs,) = torch.autograd.grad(run.model(moved).sum(), moved)  # nobody's gradients but the samples'
    reference = Net()
    reference.load_state_dict({fqn: full(p.detach()) for fqn, p in run.named_parameters()})
    local = reference_grad(reference)(mean_over(reference, x[mine], y[mine]))
    both = reference_grad(reference)(mean_over(reference, x, y))
    found = [
        max(float((one - local[fqn]).abs().max()) for fqn, one in zip(local, own, strict=True)),
        max(float((whole[fqn] - both[fqn]).abs().max()) for fqn in both),
        float(of_inputs.abs().sum() == 0),
    ]
    run.close()
    return said, found


def test_gradients_of_one_ranks_samples_are_refused_unless_they_are_meant():
    for said, found in run_ranks(refused, 2, write_manifest(LAYOUTS["unit"][1])):
        assert all(each.startswith(ASKED) for each in said)
        assert max(found) <= TIGHT


def over_tp(path):
    run = composer3d.compose(Net(8), path)
    with pytest.raises(StepError) as caught:
        run.grad(run.model(torch.randn(2, 5)).sum())
    run.close()
    return str(caught.value)


def test_gradients_of_shards_are_refused():
    manifest = write_manifest("[mesh]\ntp = 2\n[sharding.tensor_parallel]\n")
    for said in run_ranks(over_tp, 2, manifest):
        assert said == "run.grad(...) returns whole gradients, and ranks along tp hold shards of their own"
