from __future__ import annotations

import math

import pytest
import torch
from support.models import (
    VOCAB,
    composed,
    gradient_error,
    mean_loss,
    mine,
    padded,
    reference_gradients,
    seeded,
    sum_loss,
    unpadded,
)

from composer3d import Evaluation, LossError, StepError
from composer3d.testing import count_collectives, run_ranks

TIGHT = 1e-12
FSDP = "[sharding.fsdp2]\n"


def only_sum(logits, targets):
    return sum_loss(logits, targets)[0]


def in_and_out(loss_fn, batch):
    """Evaluate before, inside and after a step; return the errors, and that of the step's gradients."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = batch()
    loss_1, gradients = reference_gradients(seeded(), tokens, targets)
    run = composed(FSDP + "[train]\nmicrobatch = 2\n", loss_fn=loss_fn)
    mine_tokens, mine_targets = mine(run, tokens), mine(run, targets)

    def evaluate():
        return run.evaluate(mine_tokens, target=mine_targets)

    evaluations = [evaluate()]
    with run.step(0):
        evaluations.append(evaluate())
        run.forward_backward(mine_tokens, target=mine_targets)
        evaluations.append(evaluate())
        run.clip_grad_norm_(float("inf"))
        evaluations.append(evaluate())
        error = gradient_error(run, gradients)
    evaluations.append(evaluate())
    assert all(type(e) is Evaluation and not e.loss.requires_grad for e in evaluations)
    return max(float((e.loss - loss_1).abs()) for e in evaluations), {e.count for e in evaluations}, error


@pytest.mark.parametrize(
    ("loss_fn", "batch"),
    [
        pytest.param(sum_loss, padded, id="pair"),
        # A scalar whose reduction no step has told yet.
        pytest.param(only_sum, padded, id="sum"),
        pytest.param(mean_loss, unpadded, id="mean"),
    ],
)
def test_equal_to_one_device_in_and_out_of_steps(loss_fn, batch):
    count = float((batch()[1] != -100).sum())
    for loss, counts, gradients in run_ranks(in_and_out, 2, loss_fn, batch):
        assert loss < TIGHT
        assert counts == {count}
        assert gradients < TIGHT


def modes():
    run = composed("", seeded(dropout=0.5))
    run.model.layers[1].eval()
    before = [module.training for module in run.model.modules()]
    seen = []
    run.model.layers[0].register_forward_hook(
        lambda module, *_: seen.append((module.training, torch.is_grad_enabled()))
    )
    tokens, targets = padded()
    losses = [float(run.evaluate(tokens, target=targets).loss) for _ in range(2)]
    with pytest.raises(AttributeError):  # of the loss, which takes no tuple
        run.evaluate(tokens, target=(targets,))
    after = [module.training for module in run.model.modules()]
    return losses[0] == losses[1], seen, before == after, {*before}


def test_modules_are_in_evaluation_mode_and_come_back_to_their_own():
    equal, seen, restored, both = run_ranks(modes, 1)[0]
    assert equal
    assert seen == [(False, False)] * 3  # two evaluations, and the one whose loss raised
    assert restored
    assert both == {True, False}


def opaque_mean(logits, targets):
    return mean_loss(logits, targets).exp().log()


def padded_mean():
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    run = composed("[train]\nmicrobatch = 4\n", loss_fn=mean_loss)
    # The first has no step before it; the second runs between two.
    first = run.evaluate(tokens, target=targets)
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    second = run.evaluate(tokens, target=targets)
    return float(first.loss), float(second.loss), float(mean_loss(seeded()(tokens), targets).detach())


def test_a_mean_of_uneven_micro_batches_is_the_mean_of_their_tokens():
    first, second, expected = run_ranks(padded_mean, 1)[0]
    assert abs(first - expected) < 1e-12
    assert second == first


def refusals():
    tokens, targets = padded()
    with pytest.raises(LossError) as unequal:
        run = composed("[train]\nmicrobatch = 4\n", loss_fn=opaque_mean, loss_reduction="mean")
        run.evaluate(tokens, target=targets)
    run = composed("")
    with pytest.raises(StepError) as between, run.step(0):
        run.backward(sum_loss(run.model(tokens), targets), last=False)
        run.evaluate(tokens, target=targets)
    return str(unequal.value), str(between.value)


def test_refusals():
    unequal, between = run_ranks(refusals, 1)[0]
    assert unequal.startswith("the loss is a mean, but micro-batches of this global batch have different numbers of")
    assert between == "evaluate was called between a backward and its last one; finish the batch first"


def shards():
    """Train, evaluate and train: an evaluation leaves no gathered parameters behind."""
    run = composed(FSDP)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    kinds, losses = set(), []
    with count_collectives(run.mesh) as collectives:
        for number in range(3):
            with run.step(number):
                losses.append(float(run.forward_backward(tokens, target=targets)))
                optimizer.step()
                optimizer.zero_grad()
            before = collectives.count("all_gather", "dp_shard")
            losses.append(float(run.evaluate(tokens, target=targets).loss))
            gathers = collectives.count("all_gather", "dp_shard") - before
            kinds |= {type(p).__name__ for _, p in run.named_parameters()}
    return kinds, losses, gathers


def test_parameters_are_sharded_again_afterwards():
    for kinds, losses, gathers in run_ranks(shards, 2):
        assert kinds == {"DTensor"}
        assert gathers == 4
        # The evaluation after a step sees what the next step starts from.
        assert losses[1] == pytest.approx(losses[2], rel=1e-6)
        assert losses[3] == pytest.approx(losses[4], rel=1e-6)
        assert losses[4] < losses[2] < losses[0]


def changed_behind_a_forward():
    """Change the shards after a forward that no backward follows; return the loss before and after, and what is due."""
    tokens, targets = padded()
    run = composed(FSDP + "[train]\nmicrobatch = 2\n", loss_fn=sum_loss)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.0)
    batch, target = mine(run, tokens), mine(run, targets)
    shards = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = run.evaluate(batch, target=target).loss
    with torch.no_grad():
        run.model(batch)  # gathers the root, which waits for a backward
        for shard in shards:
            shard.zero_()
    run.parameters_changed()
    return float(before), float(run.evaluate(batch, target=target).loss)


def test_what_a_forward_gathered_is_not_used_once_parameters_have_changed():
    for before, after in run_ranks(changed_behind_a_forward, 2):
        # All logits are zero: every token is as likely as any other.
        assert after == pytest.approx(math.log(VOCAB), rel=1e-6) != pytest.approx(before, rel=1e-3)
