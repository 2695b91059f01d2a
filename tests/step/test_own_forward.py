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


WEIGHTS = torch.linspace(0.1, 3.0, 11, dtype=torch.float64)


def weighted_mean(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=WEIGHTS, label_smoothing=0.1)


def unsmoothed(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=WEIGHTS)


def over_unsmoothed(model, tokens, targets):
    return unsmoothed(model(tokens), targets)


def masked(logits, targets):
    return (logits.square().sum(-1) * (targets != -100)).sum() / (targets != -100).sum()


def over_mask(model, tokens, targets):
    return masked(model(tokens), targets)


def soft_targets(logits, targets):
    return F.cross_entropy(logits[:, 0], torch.linspace(0, 1, 11, dtype=logits.dtype).expand(len(logits), 11))


def over_soft_targets(model, tokens, targets):
    return soft_targets(model(tokens), targets)


def over_class_weights(model, tokens, targets):
    return weighted_mean(model(tokens), targets)


def sum_of_all_tokens(model, tokens, targets):
    return own_sum(model(tokens), targets)


def several_terms(logits, targets):
    return mean_loss(logits, targets) + 0.01 * logits.square().mean()


def own_loop(batch, loss_fn, num_parts, with_target, objective):
    """Run a step with the loop's own forward, in parts; return the errors of the loss and of the gradients."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = batch()
    reference = seeded()
    loss_1 = objective(reference, tokens, targets)
    loss_1.backward()
    run = composed(FSDP)
    tokens, targets = mine(run, tokens), mine(run, targets)
    with run.step(0, target=targets if with_target else None):
        for part, (x, y) in enumerate(zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True), 1):
            loss = run.backward(loss_fn(run.model(x), y), last=part == num_parts)
            assert (loss is None) == (part < num_parts)
        run.clip_grad_norm_(float("inf"))
        error = gradient_error(run, {name: p.grad for name, p in reference.named_parameters()})
    return float((loss - loss_1.detach()).abs()), error


def over_all_tokens(model, tokens, targets):
    loss, count = sum_loss(model(tokens), targets)
    return loss / count


def mean_of_backwards(model, tokens, targets):
    """Each of two backwards weighs the same, whatever it holds, and in one of them every valid token of both ranks."""
    chosen = ([*range(3), *range(6, 9)], [*range(3, 6), *range(9, 12)])
    return sum(over_all_tokens(model, tokens[of_both], targets[of_both]) / 2 for of_both in chosen)


@pytest.mark.parametrize(
    ("batch", "loss_fn", "num_parts", "with_target", "objective"),
    [
        pytest.param(unpadded, mean_loss, 1, False, over_all_tokens, id="mean"),
        pytest.param(unpadded, mean_loss, 1, True, over_all_tokens, id="mean, target"),
        pytest.param(unpadded, mean_loss, 2, True, over_all_tokens, id="means, target"),
        pytest.param(padded, mean_loss, 2, False, mean_of_backwards, id="means"),
        pytest.param(padded, mean_loss, 1, False, over_all_tokens, id="padded mean"),
        pytest.param(padded, weighted_mean, 1, False, over_class_weights, id="class weights"),
        pytest.param(padded, unsmoothed, 1, False, over_unsmoothed, id="class weights, not smoothed"),
        pytest.param(padded, masked, 1, False, over_mask, id="masked mean"),
        pytest.param(unpadded, soft_targets, 1, False, over_soft_targets, id="soft targets"),
        pytest.param(padded, own_sum, 1, False, sum_of_all_tokens, id="sum"),
        pytest.param(padded, mean_loss, 1, True, over_all_tokens, id="padded mean, target"),
        pytest.param(padded, mean_loss, 2, True, over_all_tokens, id="padded means, target"),
        pytest.param(padded, own_sum, 1, True, over_all_tokens, id="sum, target"),
        pytest.param(padded, own_sum, 2, True, over_all_tokens, id="sums, target"),
        pytest.param(padded, sum_loss, 3, True, over_all_tokens, id="pairs, target"),
        pytest.param(padded, sum_loss, 3, False, over_all_tokens, id="pairs"),
    ],
)
def test_gradients_equal_one_device(batch, loss_fn, num_parts, with_target, objective):
    for loss, gradients in run_ranks(own_loop, 2, batch, loss_fn, num_parts, with_target, objective):
        assert loss < TIGHT
        assert gradients < TIGHT


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


def test_a_mean_over_unequal_targets_beside_another_term_is_refused():
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
        assert said.endswith("write run.step(n, target=target), or give backward (sum, count)")


def test_means_over_parts_of_a_padded_target_are_refused():
    assert run_ranks(opaque_refusal, 1, parts_of_means) == [
        "several means over parts of a padded target cannot be put together; give backward (sum, count) of each part"
    ]


def test_a_step_without_a_last_backward_is_refused():
    assert run_ranks(refusal, 1, StepError, no_last) == [
        "clip_grad_norm_ was called, and no backward of this step was the last one; "
        "call run.backward(loss, last=True) for the last loss of a step"
    ]


def one_padded_mean():
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    reference = seeded()
    over_all_tokens(reference, tokens, targets).backward()
    run = composed("")
    with run.step(0, target=targets):
        run.backward(mean_loss(run.model(tokens), targets))
        run.clip_grad_norm_(float("inf"))
        return gradient_error(run, {name: p.grad for name, p in reference.named_parameters()})


def test_one_mean_of_one_rank_may_be_padded():
    assert run_ranks(one_padded_mean, 1)[0] < TIGHT


def evaluated_between():
    """Evaluate a padded batch with a sum, before and inside a step whose own loss is a mean over full targets."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = unpadded()
    reference = seeded()
    over_all_tokens(reference, tokens, targets).backward()
    run = composed(FSDP + "[train]\nmicrobatch = 2\n", loss_fn=own_sum)
    evaluation = tuple(mine(run, tensor) for tensor in padded())
    run.evaluate(evaluation[0], target=evaluation[1])
    tokens, targets = mine(run, tokens), mine(run, targets)
    with run.step(1, target=targets):
        run.evaluate(evaluation[0], target=evaluation[1])
        for start in (0, 3):
            cut = slice(start, start + 3)
            run.backward(mean_loss(run.model(tokens[cut]), targets[cut]), last=start == 3)
        run.evaluate(evaluation[0], target=evaluation[1])
        run.clip_grad_norm_(float("inf"))
        return gradient_error(run, {name: p.grad for name, p in reference.named_parameters()})


def test_an_evaluation_between_changes_nothing():
    assert max(run_ranks(evaluated_between, 2)) < TIGHT


def odd_loss(run, tokens, targets):
    run.backward(F.cross_entropy(run.model(tokens).flatten(0, 1), targets.flatten()).exp())


def test_a_loss_of_unknown_reduction_is_refused():
    text = run_ranks(refusal, 1, LossError, odd_loss)[0]
    assert text.startswith("cannot tell whether the loss is a sum or a mean (its last operation is ExpBackward); ")


UNKNOWN = {
    "SqrtBackward": lambda loss: loss.sqrt(),
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
                "is no loss of the global batch where samples are mixed before (a root, a maximum, a ratio of sums); "
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


def all_as_written():
    """Return how far gradients and norms are from one device's, for every way to write a step."""
    torch.set_default_dtype(torch.float64)
    return {
        f"{way}, {num_parts} parts, {with_target=}, {last=}": as_written(SCALED[way], num_parts, with_target, last)
        for num_parts, ways in ((3, SCALED), (1, ["loss / n"]))
        for index, way in enumerate(ways)
        for with_target in (False, True)
        for last in ((index % 2 == 0) is with_target,)
    }


def as_written(scaled, num_parts, with_target, last):
    """Return the distance of gradients, after `backward` and after clipping, and of their norm."""
    tokens, targets = unpadded()
    reference = seeded()
    for x, y in zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True):
        scaled(mean_loss(reference(x), y)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    run = composed(FSDP)
    tokens, targets = mine(run, tokens), mine(run, targets)
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    with run.step(0, target=targets if with_target else None):
        for part, (x, y) in enumerate(zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True), 1):
            run.backward(scaled(mean_loss(run.model(x), y)), last=last or part == num_parts)
        seen = gradient_error(run, wanted)
        found = run.clip_grad_norm_(float("inf"))
        return seen, gradient_error(run, wanted), abs(float(found) - float(norm))


SCALED = {
    "loss / n": lambda loss: loss / 3,
    "loss / tensor": lambda loss: loss / torch.tensor(3),
    "loss * (1 / n)": lambda loss: loss * 0.25,
    "n * loss / m": lambda loss: 5 * loss / 3,
    "loss /= n": lambda loss: loss.div_(3),
}


def test_losses_that_the_loop_divides_are_added_up_as_written():
    for found in run_ranks(all_as_written, 2):
        assert {way: errors for way, errors in found.items() if max(errors) > TIGHT} == {}


def seen_gradients(num_calls, batch):
    """Return how far gradients are from one device's after each call of a step, before anybody clips."""
    torch.set_default_dtype(torch.float64)
    run = composed(FSDP + "[train]\nmicrobatch = 2\n")
    tokens, targets = batch()
    errors = []
    with run.step(0):
        for call in range(num_calls):
            chosen = slice(12 // num_calls * call, 12 // num_calls * (call + 1))
            run.forward_backward(mine(run, tokens[chosen]), target=mine(run, targets[chosen]))
            reference = seeded()
            over_all_tokens(reference, tokens[: chosen.stop], targets[: chosen.stop]).backward()
            errors.append(gradient_error(run, {name: p.grad for name, p in reference.named_parameters()}))
        run.clip_grad_norm_(float("inf"))
    return errors


def test_gradients_are_means_after_every_call():
    assert max(max(errors) for errors in run_ranks(seen_gradients, 2, 3, padded)) < TIGHT


def half_divided(run, tokens, targets):
    run.backward(mean_loss(run.model(tokens), targets), last=False)
    run.backward(mean_loss(run.model(tokens), targets) / 2)


def test_losses_of_which_some_are_divided_are_refused():
    run_ranks(assert_refused_without_target, 1, half_divided)


def assert_refused_without_target(act):
    run = composed(FSDP)
    tokens, targets = unpadded()
    with pytest.raises(LossError) as caught, run.step(0):
        act(run, tokens, targets)
    assert str(caught.value) == (
        "backward 2 of this step was given a loss times 0.5, and those before losses times 1; divide all losses of a "
        "step by the number of its backwards, or none of them, and they weigh the same"
    )


def plain_backward(run, tokens, targets):
    mean_loss(run.model(tokens), targets).backward()
    run.clip_grad_norm_(1.0)


def test_a_backward_without_the_composition_is_refused():
    assert run_ranks(refusal, 1, StepError, plain_backward) == [
        "clip_grad_norm_ was called, and no backward of step 0 was the composition's, which normalises gradients over "
        "all ranks; write run.backward(loss) instead of loss.backward()"
    ]


def returned(last):
    """Return the sum that a loop makes of what backwards return, and of what it passed, divided by 3, on average."""
    run = composed(FSDP)
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    total = passed = 0.0
    with run.step(0):
        for part, (x, y) in enumerate(zip(tokens.chunk(3), targets.chunk(3), strict=True), 1):
            loss = mean_loss(run.model(x), y) / 3
            passed += loss.item()
            total += float(run.backward(loss, last=last or part == 3) or 0.0)
    return total, passed


@pytest.mark.parametrize("last", [True, False])
def test_a_backward_returns_a_divided_loss_divided(last):
    found = run_ranks(returned, 2, last)
    wanted = sum(passed for _, passed in found) / 2
    assert [total for total, _ in found] == pytest.approx([wanted] * 2, rel=1e-6)
