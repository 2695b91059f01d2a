"""Losses of several terms, as loops of multi-task models write them, beside one device's on the whole batch."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from support.models import composed, mine
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

from composer3d import LossError
from composer3d.testing import full, run_ranks

SHARDINGS = ["[sharding.ddp]\n", "[sharding.fsdp2]\n"]


class Tasks(nn.Module):
    """Three heads, a learned log variance of each, and a mean of its own where labels are passed."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        self.log_vars = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))

    def forward(self, x, labels=None):
        hidden = torch.tanh(self.body(x))
        if labels is not None and labels.dim() == 2:
            return [cross_entropy(head(hidden), labels[:, task]) for task, head in enumerate(self.heads)]
        if labels is not None:
            logits = self.heads[0](hidden)
            return logits, cross_entropy(logits, labels, ignore_index=-1)
        return [head(hidden) for head in self.heads]


def batch(*, uneven):
    generator = torch.Generator().manual_seed(1)
    x, labels = (
        torch.randn(8, 5, generator=generator, dtype=torch.float64),
        torch.randint(0, 4, (8, 3), generator=generator),
    )
    if uneven:
        labels[:1, 0], labels[:2, 1], labels[6:, 2] = -100, -100, -100
    return x, labels, torch.randn(8, 4, generator=generator, dtype=torch.float64)


def losses(model, x, labels, _):
    outputs = model(x)
    return [cross_entropy(outputs[task], labels[:, task]) for task in range(3)]


def variances(model, *given):
    stacked = torch.stack(losses(model, *given))
    return (torch.exp(-model.log_vars) * stacked).sum() + model.log_vars.sum()


def added_inside(model, *given):
    stacked = torch.stack(losses(model, *given))
    return (0.5 * torch.exp(-2 * model.log_vars) * stacked + model.log_vars).sum()


def divided_inside(model, *given):
    stacked = torch.stack(losses(model, *given))
    return (stacked / (2 * model.log_vars.exp() ** 2) + torch.log(1 + model.log_vars**2)).sum()


def dotted(model, *given):
    stacked = torch.stack(losses(model, *given))
    return torch.dot(torch.softmax(model.log_vars, 0), stacked)


def concatenated(model, *given):
    return torch.cat([loss.reshape(1) for loss in losses(model, *given)]).sum()


def touched(model, x, labels, _):
    outputs = model(x)
    return (
        cross_entropy(outputs[0], labels[:, 0]) + 0 * outputs[1].sum() + sum(0.0 * p.sum() for p in model.parameters())
    )


def touched_means(model, x, labels, _):
    outputs = model(x)
    summed = cross_entropy(outputs[0], labels[:, 0], reduction="sum")
    return summed + sum(0.0 * output.mean() for output in outputs[1:]) + 0.0 * model.log_vars.sum()


def seeded():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Tasks()


def errors(text, written, uneven):
    """Return how far loss and gradients of a step are from one device's."""
    given, reference = batch(uneven=uneven), seeded()
    loss_1 = written(reference, *given)
    loss_1.backward()
    run = composed(text, seeded(), loss_fn=None)
    run.optimizer(torch.optim.SGD, lr=0.1)
    loss = run.backward(written(run.model, *(mine(run, each) for each in given)))
    found = {fqn: full(parameter.grad) for fqn, parameter in run.named_parameters() if parameter.grad is not None}
    expected = {fqn: parameter.grad for fqn, parameter in reference.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    run.close()
    return [
        float((loss - loss_1).detach().abs()),
        *(float((found[fqn] - expected[fqn]).abs().max()) / largest for fqn in found),
    ]


@pytest.mark.parametrize("text", SHARDINGS)
@pytest.mark.parametrize("written", [variances, added_inside, divided_inside, dotted, concatenated])
def test_losses_in_a_vector_are_averaged_beside_terms_of_parameters(text, written):
    for found in run_ranks(errors, 2, text, written, False):
        assert max(found) < 1e-12


@pytest.mark.parametrize("written", [touched, touched_means])
def test_what_is_times_0_changes_no_weight(written):
    for found in run_ranks(errors, 2, SHARDINGS[0], written, True):
        assert max(found) < 1e-12


def refused(written):
    given, run = batch(uneven=True), composed(SHARDINGS[0], seeded(), loss_fn=None)
    run.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(LossError) as caught:
        run.backward(written(run.model, *(mine(run, each) for each in given)))
    return str(caught.value)


def even_first(model, x, labels, target):
    outputs = model(x)
    return mse_loss(outputs[0], target) + cross_entropy(outputs[1], labels[:, 1]) + 0.1 * l1_loss(outputs[2], target)


def beside_all_positions(model, x, labels, _):
    outputs = model(x)
    flat, target = torch.cat(outputs), labels.T.flatten()
    mask = (target != -100).double()
    each = (cross_entropy(flat, target.clamp(min=0), reduction="none") * mask).sum() / mask.sum().clamp(min=1)
    return each + 0.3 * flat.logsumexp(-1).pow(2).mean() - 0.1 * outputs[1][labels[:, 1] != -100].abs().mean()


def penalised(model, *given):
    return sum(losses(model, *given)) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


BENT = {
    "flooding": lambda a, b: (a - 1.4).abs() + 1.4,
    "flooding, above": lambda a, b: (1.5 - a).abs() + 0.1 * b,
    "a root": lambda a, b: (2 * a + 1e-3).sqrt(),
    "a square": lambda a, b: a + 0.5 * (b - 1) ** 2,
    "a logarithm": lambda a, b: a.log() / 2,
    "an exponential": lambda a, b: (a / 2).exp() - b,
    "of a sum": lambda a, b: (a * 3).square(),
    "bounded": lambda a, b: a.clamp(min=0.1, max=9.0) + torch.nn.functional.softplus(b - 1),
    "above a bound": lambda a, b: (a - 1.4).relu() + (b - 9).relu(),
    "below a bound": lambda a, b: (1.5 - a).relu() + (1.4 - b).relu(),
    "squashed": lambda a, b: (a - 1).sigmoid() + 2 * (b - 1).tanh(),
    "its error": lambda a, b: mse_loss(b, torch.tensor(0.3)) + torch.maximum(a, torch.tensor(0.1)),
}


def bent(name):
    def written(model, x, labels, _):
        outputs = model(x)
        counts = (labels[:, 1] != -100).sum().clamp(min=1)
        return BENT[name](
            cross_entropy(outputs[0], labels[:, 0]),
            cross_entropy(outputs[1], labels[:, 1], reduction="sum") / counts,
        )

    return written


def errors_of_bent(text):
    records = []
    logging.getLogger("composer3d.step.losses.mixed_values").addFilter(
        lambda record: records.append(record.getMessage())
    )
    return {name: max(errors(text, bent(name), True)) for name in BENT}, records


@pytest.mark.parametrize("text", SHARDINGS)
def test_a_function_of_a_mean_is_that_of_the_mean_over_all_ranks(text):
    for found, said in run_ranks(errors_of_bent, 2, text):
        assert max(found.values()) < 1e-12 and not said, (found, said)


@pytest.mark.parametrize("text", SHARDINGS)
def test_terms_over_other_numbers_of_targets_are_each_weighed_by_their_own(text):
    for written in (even_first, beside_all_positions, penalised, variances, added_inside, divided_inside):
        for found in run_ranks(errors, 2, text, written, True):
            assert max(found) < 1e-12, written


def test_terms_that_are_weighed_by_one_number_are_refused_with_what_to_write():
    for text in run_ranks(refused, 2, dotted):
        assert text == (
            "ranks divide terms of the loss by different numbers, and its graph does not separate them, as where one "
            "operation weighs several (torch.dot), or one term is made of another: divide the sum of each term by its "
            "targets on all ranks, which dist.all_reduce adds up, and write run.backward(loss, "
            'reduction="sum"); terms of parameters alone have a backward of their own after it'
        )


def as_told(text):
    """Return how far gradients are from one device's where a loop writes what the refusal says."""
    given, reference = batch(uneven=True), seeded()
    variances(reference, *given).backward()
    run = composed(text, seeded(), loss_fn=None)
    run.optimizer(torch.optim.SGD, lr=0.1)
    x, labels, _ = (mine(run, each) for each in given)
    counts = (labels != -100).sum(0)
    dist.all_reduce(counts)
    sums = [cross_entropy(each, labels[:, task], reduction="sum") for task, each in enumerate(run.model(x))]
    run.backward((torch.exp(-run.model.log_vars) * torch.stack(sums) / counts).sum(), reduction="sum")
    run.backward(run.model.log_vars.sum())
    wanted = {fqn: parameter.grad for fqn, parameter in reference.named_parameters()}
    return max(
        float((full(p.grad) - wanted[fqn]).abs().max() / wanted[fqn].abs().max()) for fqn, p in run.named_parameters()
    )


@pytest.mark.parametrize("text", SHARDINGS)
def test_what_the_refusal_says_to_write_is_one_devices(text):
    assert max(run_ranks(as_told, 2, text)) < 1e-12


def roots(model, *given):
    return torch.stack(losses(model, *given)).sqrt().sum()


def test_a_sum_of_what_bends_means_is_refused():
    for text in run_ranks(refused, 2, roots):
        assert "it is a sum, and what it adds up is made of several samples" in text


def own_mean(model, x, labels, _):
    return model(x, labels[:, 0].clamp(min=-1))[1]


def own_means(model, x, labels, _):
    first, second, _ = model(x, labels)
    return first + 0.5 * second


@pytest.mark.parametrize(("written", "uneven"), [(own_mean, True), (own_means, False)])
def test_a_models_own_means_are_seen_through_ddps_search_for_unused_parameters(written, uneven):
    text = '[sharding.ddp]\nreducer = "bucketed"\nfind_unused_parameters = true\n'
    for found in run_ranks(errors, 2, text, written, uneven):
        assert max(found) < 1e-12
