"""Means times learned numbers, as weights of tasks: weighed by their targets, or refused like the means themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, gradient_error, mine
from torch import nn

from composer3d.testing import run_ranks

UNEVEN = (-100, 1, 2, 3, 4, -100, -100, -100)
NOTHING_ON_ONE = (0, 1, -100, 3, -100, -100, -100, -100)


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.number, self.log_variance = nn.Linear(6, 5), nn.Linear(6, 1), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.classes(x), self.number(x)[:, 0], self.log_variance + 0.3


def classes(output, target):
    return F.cross_entropy(output[0], target)


def over_mask(output, target):
    mask = (target != -100).double()
    return (F.cross_entropy(output[0], target, reduction="none") * mask).sum() / mask.sum()


def over_selected(output, target):
    return F.cross_entropy(output[0][target != -100], target[target != -100])


LOSSES = {
    "times": lambda mean, output, target: torch.exp(-output[2][0]) * mean(output, target),
    "twice": lambda mean, output, target: 2 * output[2][1] * (torch.exp(-output[2][0]) * mean(output, target) / 4),
    "divided": lambda mean, output, target: mean(output, target) / output[2][0].exp(),
    "counted": lambda mean, output, target: output[2][0].exp() * (mean(output, target) * (target != -100).sum()),
}


def learned_sum(_, output, target):
    mask = (target != -100).double()
    return output[2][0].exp() * (F.cross_entropy(output[0], target, reduction="none") * mask).sum() / mask.sum()


def two_tasks(_, output, target):
    squares = F.mse_loss(output[1], output[1].detach() + 1)
    weights = torch.exp(-output[2])
    return weights[0] * classes(output, target) + weights[1] * squares + output[2].sum()


def seeded():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Tasks()


def errors(written, mean, labels):
    """Return the distance of the gradients from one device's, and of the loss."""
    loss_fn = {**LOSSES, "sum": learned_sum, "two": two_tasks}[written]
    reference, target = seeded(), torch.tensor(labels)
    x = torch.randn(8, 6)
    wanted = loss_fn(mean, reference(x), target)
    wanted.backward()
    run = composed("[sharding.fsdp2]\n", model=seeded(), loss_fn=None)
    returned = run.backward(loss_fn(mean, run.model(mine(run, x)), mine(run, target)))
    run.clip_grad_norm_(float("inf"))
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    return gradient_error(run, gradients), abs(returned.item() - wanted.item())


@pytest.mark.parametrize("mean", [classes, over_mask, over_selected])
@pytest.mark.parametrize("written", LOSSES)
def test_a_mean_times_a_learned_number_is_weighed_by_its_targets(written, mean):
    for gradients, loss in run_ranks(errors, 2, written, mean, UNEVEN):
        assert gradients < 1e-12 and loss < 1e-12


def test_a_learned_number_times_a_sum_is_weighed_by_what_divides_it():
    for gradients, loss in run_ranks(errors, 2, "sum", classes, UNEVEN):
        assert gradients < 1e-12 and loss < 1e-12


@pytest.mark.parametrize("mean", [classes, over_mask])
def test_a_rank_without_targets_has_no_part_in_the_learned_number(mean):
    for gradients, loss in run_ranks(errors, 2, "times", mean, NOTHING_ON_ONE):
        assert gradients < 1e-12 and loss < 1e-12


def test_two_tasks_of_other_numbers_of_targets_are_each_weighed_by_its_own():
    for gradients, loss in run_ranks(errors, 2, "two", classes, UNEVEN):
        assert gradients < 1e-12 and loss < 1e-12


def test_two_tasks_of_equal_numbers_of_targets_are_weighed():
    for gradients, loss in run_ranks(errors, 2, "two", classes, (0, 1, -100, -100, 2, 3, -100, -100)):
        assert gradients < 1e-12 and loss < 1e-12


def errors_of_a_loss_fn(written, labels, tables):
    """As `errors`, of a loss function that the run calls itself; micro-batches of two samples where `tables` say so."""
    loss_fn = LOSSES[written]
    reference, target = seeded(), torch.tensor(labels)
    x = torch.randn(8, 6)
    wanted = loss_fn(classes, reference(x), target)
    wanted.backward()
    run = composed(f"{tables}[sharding.fsdp2]\n", model=seeded(), loss_fn=lambda *given: loss_fn(classes, *given))
    with run.step(0):
        returned = run.forward_backward(mine(run, x), target=mine(run, target))
        run.clip_grad_norm_(float("inf"))
        gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        return gradient_error(run, gradients), abs(returned.item() - wanted.item())


@pytest.mark.parametrize("tables", ["", "[train]\nmicrobatch = 2\n"], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("written", ["times", "twice", "divided"])
def test_a_loss_function_with_a_learned_factor_is_weighed_by_its_targets(written, tables):
    for gradients, loss in run_ranks(errors_of_a_loss_fn, 2, written, UNEVEN, tables):
        assert gradients < 1e-12 and loss < 1e-12
