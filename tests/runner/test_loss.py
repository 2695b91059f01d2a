"""Losses that a manifest names: outputs of other forms, and scalars whose reduction is stated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from composer3d import LossError
from composer3d.runner.evaluating.evaluation_metrics import accuracy
from composer3d.runner.objective.loss_functions import make_loss, token_loss
from composer3d.runner.objective.loss_table import LossTable
from composer3d.step.losses.loss import as_loss
from composer3d.step.losses.loss_graph import reduction_of

TARGET = torch.tensor([[1, 3, -100]])


@pytest.fixture
def logits():
    return torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_the_logits_may_be_a_key_of_what_a_model_returns(logits):
    expected = token_loss(logits, TARGET)
    found = token_loss({"logits": logits, "hidden": logits.sum()}, TARGET)
    assert found.sum == expected.sum and found.count == expected.count == 2
    assert accuracy({"logits": logits}, TARGET) == accuracy(logits, TARGET)


def test_elements_are_compared_with_such_logits(tmp_path, logits):
    loss = make_loss(LossTable(use="mse"), tmp_path).function({"logits": logits}, torch.zeros(1, 3, 4))
    assert torch.equal(loss.sum, logits.square().sum()) and loss.count == 12


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_manifest_says_what_a_scaled_scalar_is(tmp_path, logits, reduction):
    plain = make_loss(LossTable(use="support.scaled_losses:bent"), tmp_path)
    with pytest.raises(
        LossError, match=r'in a manifest \[train\] loss = { use = "module:callable", reduction = "sum" }'
    ):
        reduction_of(plain.function(logits, TARGET))
    loss = make_loss(LossTable(use="support.scaled_losses:scaled", reduction=reduction, args={"k": 3.0}), tmp_path)
    value = loss.function(logits, TARGET)
    total = 3.0 * F.cross_entropy(logits.flatten(0, 1), TARGET.flatten(), reduction="sum")
    assert reduction_of(value) == reduction
    found = as_loss(value, count=loss.count(TARGET), equal=True, reduction=None)
    assert torch.equal(found.sum, total * (2 if reduction == "mean" else 1)) and found.count == 2


@pytest.mark.parametrize("args", [{"k": 2.0}, {"k": 1.0, "weight": [1.0, 2.0, 3.0, 4.0]}])
def test_a_mean_that_is_stated_is_weighed_by_its_targets(tmp_path, logits, args):
    target = TARGET.clone()
    loss = make_loss(LossTable(use="support.scaled_losses:scaled_mean", reduction="mean", args=args), tmp_path)
    value = loss.function(logits, target)
    found = as_loss(value, count=loss.count(target), equal=False, reduction=reduction_of(value))
    weights = torch.tensor(args.get("weight", [1.0] * 4))
    assert float(found.count) == pytest.approx(float(weights[target[target != -100]].sum()))
    assert float(found.sum.detach()) == pytest.approx(float(value.detach()) * float(found.count))


def test_a_reduction_of_what_says_its_count_itself_is_refused(tmp_path, logits):
    with pytest.raises(LossError) as caught:
        make_loss(LossTable(use="support.scaled_losses:pair", reduction="sum"), tmp_path).function(logits, TARGET)
    assert str(caught.value) == (
        '[train] loss has reduction = "sum", which says what a scalar is, and the loss returned tuple; remove it'
    )


def test_a_reduction_of_a_named_loss_is_refused():
    with pytest.raises(ValueError, match='"mse" is a mean over what it counts; remove reduction'):
        LossTable(use="mse", reduction="sum")
