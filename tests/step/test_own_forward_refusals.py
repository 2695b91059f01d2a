"""Losses of a loop that are refused: of unknown reductions, over padded targets, mixed or divided unequally."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, gradient_error, mean_loss, mine, padded, seeded, sum_loss, unpadded

from composer3d import LossError, StepError
from composer3d.testing import run_ranks

TIGHT = 1e-12
FSDP = "[sharding.fsdp2]\n"
MEAN_REFUSED = (
    "the loss is a mean, but micro-batches of this global batch have different numbers of valid tokens, and a mean of "
    "means is another loss; return a sum and its count instead, for example F.cross_entropy(logits.flatten(0, 1), "
    "target.flatten(), reduction='sum'), (target != -100).sum()"
)


def own_sum(logits, targets):
    return sum_loss(logits, targets)[0]


def several_terms(logits, targets):
    return mean_loss(logits, targets) + 0.01 * logits.erf().mean()


def refusal(kind, act, **options):
    run = composed(FSDP, **options)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with pytest.raises(kind) as caught, run.step(0, target=targets):
        act(run, tokens, targets)
    return str(caught.value)


def opaque_refusal(act):
    return refusal(LossError, act, loss_reduction="mean")


def opaque_mean(logits, targets):
    return mean_loss(logits, targets).exp().log()


def padded_mean(run, tokens, targets):
    run.backward(opaque_mean(run.model(tokens), targets))


def parts_of_means(run, tokens, targets):
    for start in (0, 6):
        cut = slice(start, start + 6)
        run.backward(opaque_mean(run.model(tokens[cut]), targets[cut]), last=start == 6)


def no_last(run, tokens, targets):
    run.backward(sum_loss(run.model(tokens), targets), last=False)
    run.clip_grad_norm_(1.0)


def test_means_over_padded_targets_of_several_ranks_are_refused():
    assert run_ranks(opaque_refusal, 2, padded_mean) == [MEAN_REFUSED] * 2


def test_a_mean_over_unequal_targets_beside_a_term_of_unknown_value_is_refused():
    def step():
        run = composed(FSDP)
        tokens, targets = (mine(run, tensor) for tensor in padded())
        with pytest.raises(LossError) as caught, run.step(0):
            run.backward(several_terms(run.model(tokens), targets))
        tokens, targets = (mine(run, tensor) for tensor in unpadded())
        with run.step(1):
            run.backward(several_terms(run.model(tokens), targets))  # of equal numbers
        return str(caught.value)

    for said in run_ranks(step, 2):
        assert said.startswith("a term of the loss is a mean over ")
        assert said.endswith("terms of parameters alone have a backward of their own after it")


def test_means_over_parts_of_a_padded_target_are_refused():
    assert run_ranks(opaque_refusal, 1, parts_of_means) == [
        "several means over parts of a padded target cannot be put together; give backward (sum, count) of each part"
    ]


def test_a_step_without_a_last_backward_is_refused():
    assert run_ranks(refusal, 1, StepError, no_last) == [
        "clip_grad_norm_ was called, and no backward of this step was the last one; "
        "call run.backward(loss, last=True) for the last loss of a step"
    ]


def odd_loss(run, tokens, targets):
    run.backward(F.cross_entropy(run.model(tokens).flatten(0, 1), targets.flatten()).exp())


def test_a_loss_of_unknown_reduction_is_refused():
    text = run_ranks(refusal, 1, LossError, odd_loss)[0]
    assert text.startswith("cannot tell whether the loss is a sum or a mean (its last operation is ExpBackward); ")


UNKNOWN = {
    "LgammaBackward": lambda loss: loss.lgamma(),
    "MaxBackward1": lambda loss: torch.stack([loss, 2 * loss]).max(),
    "DivBackward": lambda loss: loss / (1 + loss),
}


def mixed_samples():
    """Return what is said to losses of which no target is given, and gradients where the loop states what one is."""
    torch.set_default_dtype(torch.float64)
    run, found = composed(FSDP), []
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    for unknown in UNKNOWN.values():
        with pytest.raises(LossError) as caught, run.step(0):
            run.backward(unknown(mean_loss(run.model(tokens), targets)))
        found.append(str(caught.value))
        run.model.zero_grad()
    with pytest.raises(LossError) as caught, run.step(0):
        run.backward(mean_loss(run.model(tokens), targets) + own_sum(run.model(tokens), targets))
    run.model.zero_grad()
    reference, (tokens, targets) = seeded(), unpadded()
    parts = [mean_loss(reference(x), y).sqrt() for x, y in zip(tokens.chunk(2), targets.chunk(2), strict=True)]
    (sum(parts) / 2).backward()
    tokens, targets = mine(run, tokens), mine(run, targets)
    with run.step(0):
        run.backward(mean_loss(run.model(tokens), targets).sqrt(), reduction="mean")
        error = gradient_error(run, {name: p.grad for name, p in reference.named_parameters()})
    return [*found, str(caught.value)], error


def test_a_loss_that_mixes_the_samples_of_a_rank_is_refused_until_the_loop_states_that_ranks_average_it():
    for texts, error in run_ranks(mixed_samples, 2):
        seen = [*(f"its last operation is {name}" for name in UNKNOWN), "some of its terms are sums"]
        for text, what in zip(texts, seen, strict=True):
            assert text == (
                f"cannot tell whether the loss is a mean over this rank's samples: {what}. Ranks average means, which "
                "is no loss of the global batch where samples are mixed before (a maximum, a ratio of sums); "
                'if it is a mean, or is meant to be averaged over ranks, write run.backward(loss, reduction="mean"), '
                "else give backward (sum, count)"
            )
        assert error < TIGHT


def penalised_unevenly():
    """Return what is said to a penalty beside a mean, and a pair, whose weight is another one on every rank."""
    run, found = composed(FSDP), []
    tokens, targets = (mine(run, tensor) for tensor in padded())
    for with_target in (False, True):
        with pytest.raises(LossError) as caught, run.step(0, target=targets if with_target else None):
            total, count = sum_loss(run.model(tokens), targets)
            penalty = 0.01 * sum(parameter.pow(2).sum() for parameter in run.model.parameters())
            run.backward(total / count + penalty if with_target else (total + count * penalty, count))
        found.append(str(caught.value))
    return found


def test_a_penalty_that_ranks_would_weigh_differently_is_refused_with_what_to_write():
    said = (
        "the loss adds a term of parameters alone, as a penalty, to a sum or mean over other numbers of targets on "
        "every rank, and ranks that weigh their losses differently have one penalty: add its gradient after the "
        "backward (p.grad.add_(p.detach(), alpha=0.02) for 0.01 * p.pow(2).sum()), or set the optimizer's weight_decay"
    )
    assert run_ranks(penalised_unevenly, 2) == [[said, said]] * 2


def plain_backward(run, tokens, targets):
    mean_loss(run.model(tokens), targets).backward()
    run.clip_grad_norm_(1.0)


def test_a_backward_without_the_composition_is_refused():
    assert run_ranks(refusal, 1, StepError, plain_backward) == [
        "clip_grad_norm_ was called, and no backward of step 0 was the composition's, which normalises gradients over "
        "all ranks; write run.backward(loss) instead of loss.backward(); gradients that the loop puts together itself "
        "start from p.grad of run.backward(loss) too: clone them, and write into p.grad"
    ]
