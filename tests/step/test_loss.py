from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d import Loss, LossError, RankError
from composer3d.step.losses.loss import as_loss, count_valid, loss_of_model
from composer3d.step.losses.loss_graph import divisor_of_mean, has_other_divisor, reduction_of
from composer3d.testing import assert_gradients_equal, run_ranks

RETURN_A_SUM = (
    "return a sum and its count instead, for example "
    "F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction='sum'), (target != -100).sum()"
)
CANNOT_TELL = (
    'cannot tell whether the loss is a sum or a mean ({}); pass compose(loss_reduction="mean") or "sum", in a '
    'manifest [train] loss = {{ use = "module:callable", reduction = "sum" }}, or ' + RETURN_A_SUM
)

LOSSES = {
    "cross_entropy": lambda x, how: F.cross_entropy(x, torch.tensor([0, 2, -100]), reduction=how),
    "cross_entropy of images": lambda x, how: F.cross_entropy(
        x.view(1, 3, 3, 1), torch.zeros(1, 3, 1, dtype=torch.int64), reduction=how
    ),
    "nll_loss": lambda x, how: F.nll_loss(x, torch.tensor([0, 2, 1]), reduction=how),
    "mse": lambda x, how: F.mse_loss(x, torch.ones(3, 3), reduction=how),
    "l1": lambda x, how: F.l1_loss(x, torch.ones(3, 3), reduction=how),
    "smooth_l1": lambda x, how: F.smooth_l1_loss(x, torch.ones(3, 3), reduction=how),
    "huber": lambda x, how: F.huber_loss(x, torch.ones(3, 3), reduction=how),
    "bce": lambda x, how: F.binary_cross_entropy(x.sigmoid(), torch.ones(3, 3), reduction=how),
    "bce with logits": lambda x, how: F.binary_cross_entropy_with_logits(x, torch.ones(3, 3), reduction=how),
    "kl_div": lambda x, how: F.kl_div(x, torch.ones(3, 3), reduction="batchmean" if how == "mean" else how),
    "label smoothing": lambda x, how: F.cross_entropy(
        x, torch.tensor([0, 2, -100]), reduction=how, label_smoothing=0.1
    ),
    "two losses": lambda x, how: F.mse_loss(x, torch.ones(3, 3), reduction=how) + getattr(x.square(), how)(),
    "tensor methods": lambda x, how: x.square().mean() if how == "mean" else x.square().sum(),
    "along all dims": lambda x, how: x.mean((0, 1)) if how == "mean" else x.sum((0, 1)),
    "a wider copy": lambda x, how: getattr(x.bfloat16(), how)().float(),
    "beside a constant": lambda x, how: 1 - getattr(x, how)(),
    "stacked": lambda x, how: torch.stack([getattr(x, how)(), getattr(x.square(), how)()]).sum(),
    "reshaped": lambda x, how: getattr(x, how)().reshape(1).squeeze().view(1),
}


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_the_graph_tells_sums_from_means(loss, how):
    assert reduction_of(loss(torch.rand(3, 3, requires_grad=True), how)) == how


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: x.sum() / 3,
        lambda x: x.square().mean(0).sum(),
        lambda x: F.cross_entropy(x, torch.full((3, 3), 1 / 3)),
        lambda x: x.mean() + 0.1 * nn.Parameter(torch.ones(3)).square().sum(),
    ],
    ids=["a sum that is divided", "means over samples added up", "soft targets", "a mean and a penalty"],
)
def test_these_are_means(loss):
    assert reduction_of(loss(torch.rand(3, 3, requires_grad=True))) == "mean"


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (lambda x: x.sum() + x.mean(), "its last operation is AddBackward"),
        (
            lambda x: 0.5 * x.sum(),
            "it multiplies a sum by 0.5, and what it adds up does not show so many samples or targets; where "
            'that is counted over several backwards of this rank write reduction="mean", and where it is a constant, '
            'or counted over all ranks, reduction="sum"',
        ),
        (lambda x: x.sum() / x.square().sum(), "its last operation is DivBackward"),
        (
            lambda x: x.sum() / torch.tensor(2.0) + x.mean(),
            "it adds up means over different numbers, 3 and 2, which no one count weighs",
        ),
        (lambda x: x.logsumexp(0), "its last operation is LogsumexpBackward"),
        (lambda x: x.sum().detach(), "it has no graph"),
    ],
)
def test_what_tells_nothing_is_refused(loss, seen):
    with pytest.raises(LossError, match=f"^{re.escape(CANNOT_TELL.format(seen))}$"):
        reduction_of(loss(torch.rand(3, requires_grad=True)))


@pytest.mark.parametrize(
    ("target", "count"),
    [
        (torch.tensor([[1, -100, 3], [-100, -100, 0]]), 3),
        (torch.tensor([True, False]), 2),
        (torch.full((2, 2), -100), 0),
        (torch.tensor([-100.0, 1.0]), 2),
        (torch.zeros(3, dtype=torch.complex64), 3),
        ({"labels": torch.tensor([1, -100]), "mask": torch.ones(9)}, 1),
    ],
)
def test_valid_tokens_are_counted(target, count):
    assert count_valid(target) == count


@pytest.mark.parametrize("target", [(torch.ones(2),), {"targets": torch.ones(2)}])
def test_other_targets_need_a_function(target):
    with pytest.raises(LossError) as caught:
        count_valid(target)
    assert str(caught.value) == (
        f"cannot count the valid tokens of a target of type {type(target).__name__}; return the loss as (sum, count), "
        "or as a mean, or pass compose(count_fn=...), which returns their number"
    )


def given(value, *, count=5, equal=True, reduction=None):
    return as_loss(value, count=count, equal=equal, reduction=reduction)


def test_every_form_becomes_a_sum_and_a_count():
    x = torch.arange(4.0, requires_grad=True)
    loss = Loss(sum=x.sum(), count=7, auxiliary=x.mean())
    assert given(loss) is loss
    assert (given((x.sum(), 3)).sum.item(), given([x.sum(), 3]).count) == (6.0, 3)
    assert (given(x.sum()).sum.item(), given(x.sum()).count) == (6.0, 5)
    assert (given(x.mean()).sum.item(), given(x.mean()).count) == (7.5, 5)
    assert given(x.sum().reshape(1, 1)).sum.shape == ()


def test_what_compose_was_told_beats_the_graph():
    x = torch.arange(4.0, requires_grad=True)
    assert given(x.sum(), reduction="mean").sum.item() == 30.0
    assert given(x.mean(), reduction="sum").sum.item() == 1.5
    assert given(torch.tensor(2.0), reduction="sum").sum.item() == 2.0


@pytest.mark.parametrize(
    ("loss", "count", "equal"),
    [
        (lambda x: F.cross_entropy(x, torch.tensor([0, 2, -100])), 2, False),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 2, 7]), ignore_index=7), 2, False),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1]), weight=torch.tensor([0.5, 1.0, 2.0])), 3.5, True),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1]), weight=torch.tensor([0.5, 1.0, 2.0])) / 4, 3.5, True),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 2, -100]), label_smoothing=0.1), 2, True),
        (
            lambda x: (
                F.cross_entropy(x, torch.tensor([0, 2, 1]), weight=torch.arange(1.0, 4.0), label_smoothing=0.1) / 2
            ),
            6,
            True,
        ),
        (lambda x: F.mse_loss(x, torch.ones(3, 3)) + 0.5 * x.square().mean(), 9, False),
        (lambda x: (x * torch.eye(3)).sum() / torch.eye(3).sum(), 3, True),
        (lambda x: x.sum() / 9, 9, True),
        (lambda x: x[torch.eye(3) > 0].mean(), 3, True),
        (lambda x: x.masked_select(torch.eye(3) > 0).mean(), 3, True),
        (lambda x: F.mse_loss(x, torch.ones(3, 3)), 9, False),
        (lambda x: x.square().mean(), 9, False),
    ],
)
def test_means_weigh_what_they_were_divided_by(loss, count, equal):
    value = loss(torch.rand(3, 3, requires_grad=True))
    assert divisor_of_mean(value) == count
    assert has_other_divisor(value) == equal
    converted = given(value, equal=equal, reduction="mean")
    assert (converted.count, converted.sum) == (count, value * count)


def test_a_divisor_with_a_gradient_is_no_number_of_elements():
    x = torch.rand(3, requires_grad=True)
    assert divisor_of_mean(x.sum() / x.square().sum()) is None


def test_a_mean_is_refused_where_counts_differ():
    x = torch.arange(4.0, requires_grad=True)
    assert given(x.sum(), equal=False).count == 5
    with pytest.raises(LossError) as caught:
        given(x.logsumexp(0), equal=False, reduction="mean")
    assert str(caught.value) == (
        "the loss is a mean, but micro-batches of this global batch have different numbers of valid tokens, "
        "and a mean of means is another loss; " + RETURN_A_SUM
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.ones(2, 3), "a Tensor of shape [2, 3]"),
        (1.5, "a float"),
        ({"loss": torch.ones(())}, "a dict"),
        (None, "a NoneType"),
        ((torch.ones(()),) * 3, "a tuple"),
    ],
)
def test_what_is_no_loss_is_refused(value, shown):
    with pytest.raises(LossError) as caught:
        given(value)
    assert str(caught.value) == f"the loss is {shown}, not a scalar; {RETURN_A_SUM}"


def told_apart(path, form, count_fn=None):
    """Train one step on targets of another form, whose loss says what it counts; uneven over ranks."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, reference = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    reference.load_state_dict(model.state_dict())
    x, y, weight = torch.randn(4, 5), torch.randn(4, 3), torch.tensor([1.0, 0.0, 1.0, 1.0])

    def loss_fn(output, target):
        total = ((output - target["y"]).square().sum(-1) * target["weight"]).sum()
        if form == "mean":
            return total / target["weight"].sum()
        return Loss(sum=total, count=target["weight"].sum()) if form == "pair" else total

    (((reference(x) - y).square().sum(-1) * weight).sum() / weight.sum()).backward()
    run = composer3d.compose(model, path, loss_fn=loss_fn, count_fn=count_fn)
    rank = run.context.data_parallel_rank
    mine = slice(2 * rank, 2 * rank + 2)
    target = {"y": y[mine], "weight": weight[mine]}
    with run.step(0):
        trained = run.forward_backward(x[mine], target=target)
    assert abs(trained - run.evaluate(x[mine], target=target).loss) < 1e-12
    found = {fqn: parameter.grad.full_tensor() for fqn, parameter in run.named_parameters()}
    run.close()
    return found, {fqn: parameter.grad for fqn, parameter in reference.named_parameters()}


@pytest.mark.parametrize(("form", "count_fn"), [("pair", None), ("mean", None), ("mean", len)])
def test_a_loss_that_says_its_count_needs_no_count_of_its_targets(form, count_fn):
    for found, expected in run_ranks(told_apart, 2, write_manifest("[sharding.fsdp2]\n"), form, count_fn):
        assert_gradients_equal(found, expected, tolerance=1e-12)


def test_a_scalar_loss_of_such_targets_needs_one():
    message = "cannot count the valid tokens of a target of type dict; return the loss as"
    with pytest.raises(RankError, match=message):
        run_ranks(told_apart, 1, write_manifest("[sharding.fsdp2]\n"), "sum")


@pytest.mark.parametrize("output", [{"loss": 3.0, "logits": 1.0}, SimpleNamespace(loss=3.0), 3.0])
def test_the_loss_of_a_model_is_an_attribute_a_key_or_the_output(output):
    assert loss_of_model(output) == 3.0
