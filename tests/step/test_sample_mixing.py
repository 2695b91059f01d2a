"""Sums, means, and sums of what is made of several samples, told from one another by their graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, mine
from torch import nn

from composer3d import LossError
from composer3d.step.losses.criterion import Criterion
from composer3d.step.losses.loss_graph import reduction_of
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
FEATURES = torch.linspace(0.1, 1.0, 6)
SUMS = {
    "weights of features": lambda o, y: (FEATURES * (o - y) ** 2).sum(),
    "means of each sample": lambda o, y: (o - y).pow(2).mean(1).sum(),
    "norms of each sample": lambda o, y: (o - y).norm(dim=1).sum(),
    "soft targets": lambda o, y: -(y.softmax(1) * o.log_softmax(1)).sum(),
    "logsumexp of rows": lambda o, y: (o.logsumexp(1) - (o * y).sum(1)).sum(),
    "a variational bound": lambda o, y: F.mse_loss(o, y, reduction="sum") - 0.5 * torch.sum(1 + o - o.pow(2) - o.exp()),
    "times a number": lambda o, y: 0.3 * ((o - y) ** 2).sum(),
    "one sample selected": lambda o, y: (torch.eye(len(o))[0] * ((o - y) ** 2).sum(1)).sum(),
    "an einsum": lambda o, y: -torch.einsum("ij,ij->", o.log_softmax(1), y.softmax(1)),
    "a python sum": lambda o, y: sum(((a - b) ** 2).sum() for a, b in zip(o, y, strict=True)),
}
MEANS = {
    "means over samples, weighted": lambda o, y: (FEATURES * (o - y).pow(2).mean(0)).sum(),
    "stacked losses of samples": lambda o, y: torch.stack(
        [((a - b) ** 2).sum() for a, b in zip(o, y, strict=True)]
    ).mean(),
    "stacked elements": lambda o, y: torch.stack([(a[0] - b[0]) ** 2 for a, b in zip(o, y, strict=True)]).mean(),
    "a list over its length": lambda o, y: sum((a[0] - b[0]) ** 2 for a, b in zip(o, y, strict=True)) / len(o),
    "weighted tasks": lambda o, y: (torch.stack([F.mse_loss(o, y), F.l1_loss(o, y)]) * torch.tensor([0.3, 0.7])).sum(),
    "an einsum over its samples": lambda o, y: -torch.einsum("ij,ij->", o.log_softmax(1), y.softmax(1)) / len(o),
    "tasks": lambda o, y: torch.stack([F.mse_loss(o, y), F.l1_loss(o, y)]).mean(),
    "times one over its samples": lambda o, y: ((o - y) ** 2).sum() * (1 / len(o)),
    "pairs": lambda o, y: ((o[::2] - o[1::2]) ** 2).sum(1).sum() / (len(o) // 2),
}
MIXED = {
    "normalised weights": lambda o, y: ((w := (o.detach() ** 2).sum(1)) / w.sum() * ((o - y) ** 2).sum(1)).sum(),
    "softmax over samples": lambda o, y: (((o - y) ** 2).sum(1) * o.sum(1).softmax(0)).sum(),
    "a mean squared": lambda o, y: (o - y).mean(0).pow(2).sum(),
    "of means": lambda o, y: F.mse_loss(o.mean(0), y.mean(0), reduction="sum"),
    "deviations": lambda o, y: F.relu(1 - o.std(0)).sum(),
    "centred": lambda o, y: (o - o.mean(0)).pow(2).sum(),
    "cosines over samples": lambda o, y: (1 - F.cosine_similarity(o, y, dim=0)).sum(),
    "a cosine": lambda o, y: -F.cosine_similarity(o.flatten(), y.flatten(), dim=0).mean(),
}
GROUPED = {
    "means of groups": lambda o, y: (o - y).pow(2).sum(1).view(2, -1).mean(1).sum(),
    "one minus a cosine": lambda o, y: 1 - F.cosine_similarity(o.flatten(), y.flatten(), dim=0),
    "half a sum": lambda o, y: ((o - y) ** 2).sum() / 2,
    "over a constant": lambda o, y: ((o - y) ** 2).sum() / 1000,
    "over a constant tensor": lambda o, y: ((o - y) ** 2).sum() / torch.tensor(1000.0),
    "times a small constant": lambda o, y: ((o - y) ** 2).sum() * 0.001,
}


def pair():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("name", [*SUMS, *MEANS, *MIXED])
def test_graphs_tell_what_a_sum_adds_up(name):
    x, y = pair()
    loss = (SUMS | MEANS | MIXED)[name](x.requires_grad_() * 1.0, y)
    if name in MIXED:
        with pytest.raises(LossError, match="it is a sum, and what it adds up is made of several samples"):
            reduction_of(loss)
    else:
        assert reduction_of(loss) == ("sum" if name in SUMS else "mean")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def errors_and_refusals():
    """Return how far gradients are from one device's, and whether this rank refused, by loss."""
    torch.set_default_dtype(torch.float64)
    found, refused = {}, set()
    for name, loss_fn in (SUMS | MEANS | MIXED | GROUPED).items():
        if name == "one sample selected":
            continue  # of each rank
        run, reference = composed("[sharding.fsdp2]\n", model=model()), model()
        run.optimizer(torch.optim.SGD, lr=0.1)
        x, y = pair()
        loss_fn(reference(x), y).backward()
        try:
            run.backward(loss_fn(run.model(mine(run, x)), mine(run, y)))
        except LossError:
            refused.add(name)
        else:
            wanted = [p.grad for p in reference.parameters()]
            pairs = zip(run.model.parameters(), wanted, strict=True)
            found[name] = max(float((full(p.grad) - own).abs().max()) for p, own in pairs)
        run.close()
    return found, refused


@pytest.mark.parametrize("number", [1000, 2.5])
def test_a_sum_over_a_constant_is_refused_as_a_loss_function_and_taken_as_what_it_is_said_to_be(number):
    x, y = pair()
    output = x.requires_grad_() * 1.0
    loss_fn = lambda o, t: ((o - t) ** 2).sum() / number  # noqa: E731
    with pytest.raises(LossError, match=f"it divides a sum by {number}, and what it adds up does not show so many"):
        Criterion(loss_fn).loss(output, y, equal=True)
    wanted = loss_fn(output, y).detach()
    assert float(Criterion(loss_fn, reduction="sum").loss(output, y, equal=True).sum.detach()) == float(wanted)
    mean = Criterion(loss_fn, reduction="mean").loss(output, y, equal=True)
    assert abs(float(mean.sum.detach() / mean.count) - float(wanted)) < TIGHT


def stated_sums():
    """Return errors of gradients of sums times a constant, which the loop states to be sums."""
    torch.set_default_dtype(torch.float64)
    found = []
    for name in ("over a constant", "over a constant tensor", "times a small constant"):
        run, reference = composed("[mesh]\ndp_replicate = 2\n[sharding.ddp]\n", model=model()), model()
        run.optimizer(torch.optim.SGD, lr=0.1)
        x, y = pair()
        GROUPED[name](reference(x), y).backward()
        run.backward(GROUPED[name](run.model(mine(run, x)), mine(run, y)), reduction="sum")
        pairs = zip(run.model.parameters(), reference.parameters(), strict=True)
        found.append(max(float((full(p.grad) - own.grad).abs().max()) for p, own in pairs))
        run.close()
    return found


@pytest.mark.slow
def test_a_sum_over_a_constant_is_added_up_where_it_is_stated():
    for errors in run_ranks(stated_sums, 2):
        assert max(errors) < TIGHT


def test_sums_and_means_are_one_devices_and_others_are_refused_on_all_ranks():
    for found, refused in run_ranks(errors_and_refusals, 2):
        assert {name: error for name, error in found.items() if not error < TIGHT} == {}
        assert refused == {*MIXED, *GROUPED}


def whole_counts(number):
    """Return errors of gradients of sums over a number that is counted over both backwards of a rank's step."""
    torch.set_default_dtype(torch.float64)
    reference = model()
    x, y = pair()
    loss = lambda output, target, num: ((output - target) ** 2).sum() / number(num)  # noqa: E731
    loss(reference(x), y, 48).backward()
    run = composed("[sharding.fsdp2]\n", model=model())
    run.optimizer(torch.optim.SGD, lr=0.1)
    own, wanted = mine(run, x), mine(run, y)
    with pytest.raises(LossError) as caught, run.step(0):
        run.backward(loss(run.model(own[:2]), wanted[:2], 24))
    with run.step(0):
        for rows in (slice(0, 2), slice(2, 4)):
            run.backward(loss(run.model(own[rows]), wanted[rows], 24), reduction="mean")
    pairs = zip(run.model.parameters(), reference.parameters(), strict=True)
    error = max(float((full(p.grad) - own.grad).abs().max()) for p, own in pairs)
    run.close()
    return error, str(caught.value)


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_a_count_of_several_backwards_is_refused_with_what_to_write_which_is_one_devices(number):
    for error, said in run_ranks(whole_counts, 2, number):
        assert error < TIGHT
        assert (
            "it divides a sum by 24, and what it adds up does not show so many samples or targets; where that is "
            'counted over several backwards of this rank write reduction="mean", and where it is a constant, or '
            'counted over all ranks, reduction="sum"'
        ) in said


def constant_loss_function():
    """Return what a loss function is refused with that divides by a constant tensor."""
    run = composed(
        "[sharding.fsdp2]\n", model=nn.Linear(6, 6), loss_fn=lambda o, y: (o - y).square().sum() / torch.tensor(1e3)
    )
    run.optimizer(torch.optim.SGD, lr=0.1)
    x, y = (mine(run, each.float()) for each in pair())
    with pytest.raises(LossError) as caught:
        run.forward_backward(x, target=y)
    return str(caught.value)


def test_a_loss_function_over_a_constant_tensor_is_refused():
    for said in run_ranks(constant_loss_function, 2):
        assert said.startswith("cannot tell whether the loss is a sum or a mean (it divides a sum by 1000, and what")
        assert 'pass compose(loss_reduction="mean") or "sum"' in said
