"""Losses that are no sum over samples, and means over other targets than are counted: found, whoever computes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.composition_faults import VOCAB, Even
from support.models import sum_loss, write_manifest
from support.verification_cases import DDP, assert_named, batch, refuted
from torch import nn

import composer3d
from composer3d import Batch, LossError
from composer3d.models.moe import Output
from composer3d.step.losses.criterion import Criterion
from composer3d.testing import assert_parity

SUM = "the loss is no sum over samples: what it makes of one depends on the others of its micro-batch"


class TwoTowers(nn.Module):
    """CLIP's shape: features of two towers, and a temperature without dims."""

    def __init__(self):
        super().__init__()
        self.words, self.other = nn.Embedding(VOCAB, 8), nn.Embedding(VOCAB, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def features(self, tokens):
        return [F.normalize(tower(tokens).mean(1), dim=-1) for tower in (self.words, self.other)]

    def forward(self, tokens):
        return (*self.features(tokens), self.logit_scale.exp())


class Pairwise(TwoTowers):
    """As commonly written: each sample of a micro-batch beside each."""

    def forward(self, tokens):
        one, other = self.features(tokens)
        return self.logit_scale.exp() * one @ other.T


class OwnLoss(Pairwise):
    def forward(self, tokens):
        logits = super().forward(tokens)
        return F.cross_entropy(logits, torch.arange(len(tokens)), reduction="sum")


def clip_loss(output, target):
    one, other, scale = output
    return F.cross_entropy(scale * one @ other.T, torch.arange(len(one)), reduction="sum"), len(one)


def siglip_loss(output, target):
    one, other, scale = output
    labels = 2 * torch.eye(len(one), dtype=one.dtype) - 1
    return -F.logsigmoid(labels * (scale * one @ other.T)).sum(), len(one)


def pairwise_loss(logits, target):
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), len(logits)


class Scaled(Even):
    """An innocent number among the outputs."""

    def forward(self, tokens):
        return super().forward(tokens), self.out.weight.square().mean().exp()


class Balanced(Even):
    """A number of each micro-batch, as what balances experts."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits, logits.softmax(-1).mean((0, 1)).square().sum()


def scaled_loss(output, target):
    total, count = sum_loss(output[0] * output[1], target)
    return total, count


def balanced_loss(output, target):
    total, count = sum_loss(output[0], target)
    return total + 0.01 * output[1] * count, count


@pytest.mark.parametrize(
    ("factory", "loss_fn"),
    [(TwoTowers, clip_loss), (TwoTowers, siglip_loss), (Pairwise, pairwise_loss), (OwnLoss, None)],
)
def test_a_contrastive_loss_is_found(factory, loss_fn):
    assert_named(DDP, {"factory": factory, "loss_fn": loss_fn, "microbatch": 3}, SUM)


@pytest.mark.parametrize(("factory", "loss_fn"), [(Scaled, scaled_loss), (Balanced, balanced_loss)])
def test_a_number_among_the_outputs_is_no_fault(factory, loss_fn):
    assert_parity(factory, write_manifest(DDP), batch(), loss_fn=loss_fn, microbatch=3, steps=1, own_dtype=False)


class NanoGpt(Even):
    """The loss in the model, and -1 for what it leaves out."""

    def __init__(self, ignore_index=-1):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, tokens, targets):
        logits = super().forward(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.ignore_index)


def padded(number):
    whole = batch()
    targets = torch.where(whole.target == -100, number, whole.target)
    return Batch(args=whole.args, kwargs={"targets": targets}, target=None)


def test_a_mean_of_the_models_own_over_uneven_samples_is_found(monkeypatch):
    # 0 is a token, too: nothing but the loss itself says that it is left out.
    monkeypatch.setattr("support.verification_cases.batch", lambda: padded(0))
    told = refuted(DDP, factory=lambda: NanoGpt(0), loss_fn=None, microbatch=3)
    assert SUM in told


def mean(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1)


OTHER = (
    "the loss is one number, and its targets hold -1, which is no class: if the loss leaves such targets out, they are "
    "not to be counted, and only -100 is known not to be. Pass target= and "
    "compose(count_fn=lambda target: int((target != -1).sum())), or return a sum and its count: "
    "F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction='sum'), (target != -1).sum()"
)


def added(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")


def test_another_padding_than_torchs_is_read_from_a_mean_and_refused_in_a_sum_unless_it_is_counted():
    logits, target = torch.zeros(2, 3, 5, requires_grad=True), torch.tensor([[1, 2, -1], [-1, -1, 0]])
    for loss_fn, own in [(mean, False), (mean, True), (added, False), (added, True)]:
        criterion = Criterion(None if own else loss_fn)
        piece = Batch(args=(logits,), kwargs={"targets": target} if own else {}, target=None if own else target)
        criterion.count_all([piece])
        output = loss_fn(logits, target) if own else logits
        if loss_fn is mean:
            found = criterion.loss(output, piece.target, equal=True)
            assert (float(found.count), float(found.sum.detach())) == (3, 3 * float(mean(logits, target).detach()))
            continue
        with pytest.raises(LossError) as caught:
            criterion.loss(output, piece.target, equal=True)
        assert str(caught.value) == OTHER
    counted = Criterion(mean, lambda target: int((target != -1).sum()))
    assert counted.count_all([Batch(args=(logits,), target=target)]) == [3]
    assert counted.loss(logits, target, equal=True).count == 3
    summed = Criterion(lambda output, target: (output.sum(), 3))
    summed.count_all([Batch(args=(logits,), target=target)])
    assert summed.loss(logits, target, equal=True).count == 3


def test_logits_and_a_loss_are_no_sum_and_count():
    with pytest.raises(LossError) as caught:
        Criterion(None).loss((torch.zeros(2, 3), torch.zeros(())), None, equal=True)
    assert str(caught.value) == (
        "the loss is a pair whose first is a tensor of shape [2, 3], not a sum; of a model that returns logits and a "
        "loss, take the loss with compose(loss_fn=lambda output, target: output[1]), and add the cross-entropy of "
        "output[0] where that is a balance of experts or another part of the loss alone"
    )


def test_what_is_advised_of_logits_and_an_auxiliary_loss_is_the_whole_loss():
    logits, target = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    output = Output(logits=logits, auxiliary=torch.tensor(0.5))
    with pytest.raises(LossError) as caught:
        Criterion(None).loss(output, target, equal=True)
    message = str(caught.value)
    assert message.startswith("the loss is the model's output, logits of shape [2, 3, 5] and an auxiliary loss")
    names = {"composer3d": composer3d, "F": F, "output": output, "target": target}
    advised = eval(message[message.index("composer3d.Loss(") :], names)
    loss = Criterion(lambda output, target: advised).loss(output, target, equal=True)
    assert loss.count == 6 and loss.auxiliary == 0.5
    assert torch.equal(loss.sum, F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"))
