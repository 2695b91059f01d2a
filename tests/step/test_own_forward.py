"""Forwards and losses of a loop itself: gradients are those of one device, divided as the loop writes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, gradient_error, mean_loss, mine, padded, seeded, sum_loss, unpadded

from composer3d.testing import run_ranks

TIGHT = 1e-12
FSDP = "[sharding.fsdp2]\n"


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


def backwards_of(run, weights):
    """Return how far gradients of several complete backwards of one step are from one device's."""
    tokens, targets = unpadded()
    reference = seeded()
    parts = list(zip(tokens.chunk(len(weights)), targets.chunk(len(weights)), strict=True))
    for weight, (x, y) in zip(weights, parts, strict=True):
        mean = mean_loss(reference(x), y)
        (mean if weight == 1 else weight * mean).backward()
    for weight, (x, y) in zip(weights, parts, strict=True):
        mean = mean_loss(run.model(mine(run, x)), mine(run, y))
        run.backward(mean if weight == 1 else weight * mean)
    error = gradient_error(run, {name: p.grad for name, p in reference.named_parameters()})
    run.model.zero_grad()
    return error


def complete_backwards(layout):
    torch.set_default_dtype(torch.float64)
    run = composed(layout)
    run.optimizer(torch.optim.SGD, lr=0.0)
    found = []
    for weights in ((1, 1), (1, 0.3), (0.3, 1), (1, 1, 0.2)):
        with run.step(len(found)):
            found.append(backwards_of(run, weights))
    return found


@pytest.mark.parametrize(
    "layout",
    [
        FSDP,
        "[sharding.ddp]\n",
        pytest.param(FSDP + "zero = 1\n", marks=pytest.mark.slow),
        pytest.param('[sharding.ddp]\nreducer = "bucketed"\n', marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "ddp", "gathered", "bucketed"],
)
def test_losses_of_complete_backwards_are_added_up_as_written(layout):
    for errors in run_ranks(complete_backwards, 2, layout):
        assert max(errors) < TIGHT
