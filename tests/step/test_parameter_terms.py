"""Penalties with constants of a parameter's shape, and of products of parameters, beside a mean: one device's steps."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, mine
from torch import nn

from composer3d import StepError
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LAYOUTS = {
    "ddp bucketed": '[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n',
    "ddp": "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n",
    "fsdp2": "[sharding.fsdp2]\n",
    "tp": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
    "fsdp2, tp": "[mesh]\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n",
}


def elastic(model, importance, before):
    return 50 * sum((importance[n] * (p - before[n]).pow(2)).sum() for n, p in model.named_parameters())


def orthogonal(model, *_):
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    return 1e-2 * sum((w.T @ w - torch.eye(w.shape[1])).pow(2).sum() for w in weights)


def attenuated(model, *_):
    return 0.5 * sum(((p - p.detach() * 0.9).pow(2) * p.detach().abs()).sum() for p in model.parameters())


def spectral(model, *_):
    values = torch.linalg.svdvals(model[0].weight)
    return 0.1 * values[0] + 0.01 * torch.linalg.matrix_norm(model[2].weight, "nuc")


def trained(model, optimizer, backward, x, y, penalty, follows=False):
    backward(F.mse_loss(model(x), y))
    importance = {name: p.grad.detach().clone().pow(2) for name, p in model.named_parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        term = None if follows else penalty(model, importance, before)
        loss = F.mse_loss(model(x), y)
        backward(loss + (penalty(model, importance, before) if follows else term))
        optimizer.step()


def errors(layout, follows=False):
    torch.set_default_dtype(torch.float64)
    found = []
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0)).unbind()
    for penalty in (elastic, orthogonal, attenuated, spectral):
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        torch.manual_seed(0)
        run = composed(LAYOUTS[layout], model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        trained(reference, torch.optim.SGD(reference.parameters(), lr=0.1), lambda loss: loss.backward(), x, y, penalty)
        trained(run.model, optimizer, run.backward, mine(run, x), mine(run, y), penalty, follows)
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


@pytest.mark.parametrize(
    "layout", [each if each == "fsdp2, tp" else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_penalties_that_follow_the_forward_train_as_on_one_device(layout):
    for found in run_ranks(errors, 2, layout, True):  # parameters are read while a unit has gathered them
        assert max(found) < TIGHT, found


def refused():
    """Return what is said to a constant in two forms, and to one beside a parameter that was rounded."""
    found = []
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    for text in (LAYOUTS["fsdp2"], LAYOUTS["fsdp2"] + "[precision.mixed]\n"):
        run = composed(text, model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
        run.optimizer(torch.optim.SGD, lr=0.1)
        before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        term = sum((p * before[name]).sum() for name, p in run.model.named_parameters()) * (text == LAYOUTS["fsdp2"])
        loss = F.mse_loss(run.model(x), y)
        with pytest.raises(StepError) as caught:
            run.backward(loss + term + sum((p * before[name]).sum() for name, p in run.model.named_parameters()))
        found.append(str(caught.value))
        run.close()
    return found


def test_constants_that_would_be_wrong_after_a_forward_are_refused_with_their_line():
    for twice, rounded in run_ranks(refused, 2):
        assert re.sub(r"py:\d+", "py", twice) == (
            "test_parameter_terms.py: a constant is computed with beside a sharded parameter, and in the same step "
            "beside the one that the forward has gathered, and its gradients would be of one kind; give one of the "
            "terms constant.clone()"
        )
        assert re.sub(r"py:\d+", "py", rounded) == (
            "test_parameter_terms.py: a parameter that the forward has gathered in torch.bfloat16 is computed with "
            "beside a constant in torch.float32, in which one device has both, and their difference would be one of "
            "roundings; compute the term before the forward, or after run.backward(loss) in a backward of its own"
        )


class Idle(nn.Module):
    """A model with a parameter that its forward does not use, and a penalty does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.idle = nn.Parameter(torch.ones(4, 2))

    def forward(self, x):
        return self.second(self.first(x).tanh())


def norms(model):
    return 1e-2 * sum(parameter.square().sum() for parameter in model.parameters())


def step_of(form, model, backward, x, y):
    """Run one step's backwards: a penalty alone, behind a forward that no loss uses, or beside a loss."""
    if form == "beside":
        backward(F.mse_loss(model(x), y) + norms(model))
    elif form == "before and after":
        backward(norms(model))
        backward(F.mse_loss(model(x), y))
    else:
        if form == "behind a forward":
            model(x)
        backward(norms(model))


FORMS = ("alone", "behind a forward", "before and after", "beside")


def alone_errors(layout):
    torch.set_default_dtype(torch.float64)
    found = {}
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0)).unbind()
    for form in FORMS if layout != "ddp bucketed" else [form for form in FORMS if form != "before and after"]:
        torch.manual_seed(0)
        reference = Idle()
        torch.manual_seed(0)
        run = composed(LAYOUTS[layout], model=Idle())
        optimizers = torch.optim.SGD(reference.parameters(), lr=0.1), run.optimizer(torch.optim.SGD, lr=0.1)
        for each in (form, "alone", form):
            step_of(each, reference, lambda loss: loss.backward(), x, y)
            step_of(each, run.model, run.backward, mine(run, x), mine(run, y))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        pairs = zip(run.model.parameters(), reference.parameters(), strict=True)
        found[form] = max(float((full(p.detach()) - own.detach()).abs().max()) for p, own in pairs)
        run.close()
    return found


@pytest.mark.parametrize(
    "layout", [each if each == "fsdp2" else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_a_penalty_is_a_step_of_its_own_and_reaches_what_no_forward_uses(layout):
    for found in run_ranks(alone_errors, 2, layout):
        assert max(found.values()) < TIGHT, found


def unreached():
    run = composed(LAYOUTS["ddp bucketed"], model=Idle())
    run.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(StepError) as caught:
        step_of("before and after", run.model, run.backward, torch.ones(4, 6), torch.ones(4, 6))
    run.close()
    return str(caught.value)


def test_buckets_that_wait_for_what_a_penalty_alone_has_reached_are_named():
    for said in run_ranks(unreached, 2):
        assert said.startswith('no gradient reached "idle" in step 0, and torch\'s DistributedDataParallel waits')
