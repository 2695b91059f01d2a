from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import (
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

from composer3d import ComposerError, Loss, LossError, StepError
from composer3d.testing import run_ranks

TIGHT = 1e-12
FSDP = "[sharding.fsdp2]\n"
MEAN_REFUSED = (
    "the loss is a mean, but micro-batches of this global batch have different numbers of valid tokens, and a mean of "
    "means is another loss; return a sum and its count instead, for example F.cross_entropy(logits.flatten(0, 1), "
    "target.flatten(), reduction='sum'), (target != -100).sum()"
)


def message_of(call, kind=StepError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def plain():
    run = composed("")
    return run, run.optimizer(torch.optim.SGD, lr=0.1), *padded()


def outside():
    run, optimizer, *_ = plain()
    return [message_of(call) for call in (lambda: run.clip_grad_norm_(1.0), optimizer.step)]


def test_nothing_of_a_step_happens_outside_one():
    names = ("clip_grad_norm_", "optimizer.step")
    assert run_ranks(outside, 1)[0] == [
        f"{name} was called outside a step; write: with run.step(n): ..." for name in names
    ]


def twice():
    run, optimizer, x, _ = plain()
    run.backward(run.model(x).mean())
    optimizer.step()
    return message_of(optimizer.step)


def test_an_optimizer_that_steps_twice_after_one_backward_is_told_that_there_are_no_gradients():
    assert run_ranks(twice, 1)[0] == (
        "optimizer.step was called without gradients: no forward and backward has run since the optimizer's last step; "
        "call it once after the backwards of a batch"
    )


def nested():
    run, *_ = plain()

    def both():
        with run.step(3), run.step(4):
            raise AssertionError

    text = message_of(both)
    with run.step(5) as state:
        return text, state.step


def test_steps_do_not_nest_and_an_error_ends_them():
    assert run_ranks(nested, 1)[0] == ("step 4 begins inside step 3; steps do not nest", 5)


def after_the_end(use):
    run, optimizer, tokens, targets = plain()
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        run.clip_grad_norm_(1.0) if use == "clip" else optimizer.step()
        texts = [
            message_of(lambda: run.forward_backward(tokens, target=targets)),
            message_of(lambda: run.backward(run.model(tokens).sum())),
        ]
    with run.step(1):
        run.forward_backward(tokens, target=targets)
    return texts


@pytest.mark.parametrize("use", ["clip", "step"])
def test_batches_after_the_gradients_were_used_are_refused(use):
    assert run_ranks(after_the_end, 1, use)[0] == [
        f"{name} was called after the gradients of this step had been clipped or used; "
        "run all batches of a step first, and open a new step for the next optimizer step"
        for name in ("forward_backward", "backward")
    ]


def uneven_calls(text, cuts):
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    _, gradients = reference_gradients(seeded(), tokens, targets)
    run = composed(text)
    tokens, targets = mine(run, tokens), mine(run, targets)
    with run.step(0):
        for start, end in cuts:
            run.forward_backward(tokens[start:end], target=targets[start:end])
        run.clip_grad_norm_(float("inf"))
        return gradient_error(run, gradients)


def test_calls_of_different_sizes_are_one_global_batch():
    # The divisor is known only after the last call.
    assert max(run_ranks(uneven_calls, 2, FSDP, [(0, 1), (1, 2), (2, 6)])) < TIGHT


def with_loss(text, loss_fn, batch, microbatch, **options):
    """Run a step; return the loss and its error, the error of the gradients, and the metrics."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = batch()
    loss_1, gradients = reference_gradients(seeded(), tokens, targets)
    run = composed(f"{text}[train]\nmicrobatch = {microbatch}\n", loss_fn=loss_fn, **options)
    with run.step(0):
        loss = run.forward_backward(mine(run, tokens), target=mine(run, targets))
        run.clip_grad_norm_(float("inf"))
        return loss, float((loss - loss_1).abs()), gradient_error(run, gradients)


def only_sum(logits, targets):
    return sum_loss(logits, targets)[0]


def masked_mean(logits, targets):
    mask = targets.flatten() != -100
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp_min(0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def selected_mean(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")[targets.flatten() != -100].mean()


def told(logits, targets):
    return 1.0 * mean_loss(logits, targets)


@pytest.mark.parametrize(
    ("loss_fn", "batch", "options"),
    [
        pytest.param(mean_loss, unpadded, {}, id="mean"),
        pytest.param(told, unpadded, {"loss_reduction": "mean"}, id="told"),
        pytest.param(only_sum, padded, {}, id="sum"),
        pytest.param(mean_loss, padded, {}, id="mean of valid tokens"),
        pytest.param(masked_mean, padded, {}, id="mean by a mask"),
        pytest.param(selected_mean, padded, {}, id="mean of selected"),
        pytest.param(lambda *args: Loss(only_sum(*args), sum_loss(*args)[1]), padded, {}, id="Loss"),
    ],
)
def test_every_form_of_loss_gives_the_gradient_of_one_device(loss_fn, batch, options):
    results = run_ranks(lambda: with_loss(FSDP, loss_fn, batch, 2, **options), 2)
    for loss, loss_error, gradients in results:
        assert torch.equal(loss, results[0][0])
        assert loss.dtype == torch.float64
        assert loss_error < TIGHT
        assert gradients < TIGHT


def opaque_mean(logits, targets):
    return mean_loss(logits, targets).exp().log()


def unequal(text, microbatch):
    text += f"[train]\nmicrobatch = {microbatch}\n" if microbatch else ""
    run = composed(text, loss_fn=opaque_mean, loss_reduction="mean")
    tokens, targets = padded()
    with run.step(0):
        return message_of(lambda: run.forward_backward(mine(run, tokens), target=mine(run, targets)), LossError)


@pytest.mark.parametrize(("world_size", "microbatch"), [(1, 4), (2, None)], ids=["micro-batches", "ranks"])
def test_a_mean_is_refused_where_counts_differ(world_size, microbatch):
    assert run_ranks(unequal, world_size, FSDP, microbatch) == [MEAN_REFUSED] * world_size


def with_auxiliary(logits, targets):
    loss, count = sum_loss(logits, targets)
    return Loss(sum=loss, count=count, auxiliary=logits.square().mean())


def auxiliary():
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    model, total, objective, balance = seeded(), (targets != -100).sum(), 0.0, 0.0
    for start in range(0, 12, 3):
        logits, part = model(tokens[start : start + 3]), targets[start : start + 3]
        loss, count = sum_loss(logits, part)
        objective = objective + loss / total
        balance = balance + logits.square().mean() * count / total
    (objective + balance).backward()
    run = composed(FSDP + "[train]\nmicrobatch = 3\n", loss_fn=with_auxiliary)
    with run.step(0) as state:
        loss = run.forward_backward(mine(run, tokens), target=mine(run, targets))
        run.clip_grad_norm_(float("inf"))
        error = gradient_error(run, {name: p.grad for name, p in model.named_parameters()})
    return error, float(loss - objective.detach()), state.metrics["auxiliary_loss"] - float(balance.detach())


def test_an_auxiliary_loss_joins_as_its_mean_weighted_by_tokens():
    for error, loss, balance in run_ranks(auxiliary, 2):
        assert error < TIGHT
        assert abs(loss) < TIGHT
        assert abs(balance) < TIGHT


def counted(count_fn, loss_fn, divisor):
    """Run a step whose targets, or whose losses, are counted otherwise; compare with sum / divisor."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    model = seeded()
    (sum_loss(model(tokens), targets)[0] / divisor(targets)).backward()
    run = composed(FSDP + "[train]\nmicrobatch = 2\n", loss_fn=loss_fn, count_fn=count_fn)
    with run.step(0):
        run.forward_backward(mine(run, tokens), target={"y": mine(run, targets)})
        run.clip_grad_norm_(float("inf"))
        return gradient_error(run, {name: p.grad for name, p in model.named_parameters()})


def test_count_fn_says_what_a_sum_is_divided_by():
    def loss_fn(logits, target):
        return only_sum(logits, target["y"])

    assert max(run_ranks(counted, 2, lambda target: len(target["y"]), loss_fn, len)) < TIGHT


def test_counts_of_losses_beat_those_of_targets():
    def loss_fn(logits, target):
        return only_sum(logits, target["y"]), (target["y"] > 4).sum()

    results = run_ranks(counted, 2, lambda target: target["y"].numel(), loss_fn, lambda targets: (targets > 4).sum())
    assert max(results) < TIGHT


def schedule():
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    loss_1, gradients = reference_gradients(seeded(), tokens, targets)
    run = composed('[scheduling.scheduled]\nuse = "support.plugins:Scheduled"\n[train]\nmicrobatch = 3\n')
    with run.step(0):
        loss = run.forward_backward(tokens, target=targets)
        run.clip_grad_norm_(float("inf"))
        errors = gradient_error(run, gradients), float((loss - loss_1).abs())
        texts = [message_of(lambda: run.backward(loss)), message_of(lambda: run.model)]
    return *errors, float(run.evaluate(tokens, target=targets).loss - loss_1), *texts


def test_a_schedule_of_a_plugin_runs_the_micro_batches():
    gradients, loss, evaluation, backward, model = run_ranks(schedule, 1)[0]
    # The loss it calls once more, for shapes, is not counted.
    assert max(gradients, loss, abs(evaluation)) < TIGHT
    refusal = "the manifest has a pipeline, which runs the {} itself; use run.forward_backward(...)"
    held = ", and run.named_parameters() and run.named_buffers() for what this rank's stages hold"
    assert (backward, model) == (refusal.format("backward"), refusal.format("forward") + held)


def numbered():
    run, optimizer, *_ = plain()
    tokens, targets = padded()
    loader = [(tokens[:6], targets[:6]), (tokens[6:], targets[6:])]
    seen = []
    for number, (x, y) in enumerate(run.steps(loader, start=5), 5):
        run.forward_backward(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((x is loader[number - 5][0], run._engine.state.step))
    for _ in run.steps(loader):
        break
    with run.step(9):
        return seen


def test_steps_of_a_loader():
    assert run_ranks(numbered, 1)[0] == [(True, 5), (True, 6)]


def batch_that_does_not_divide():
    run = composed("[train]\nmicrobatch = 5\n")
    tokens, targets = padded()
    with run.step(0):
        return message_of(lambda: run.forward_backward(tokens, target=targets), ComposerError)


def test_a_batch_that_does_not_divide_is_refused():
    assert run_ranks(batch_that_does_not_divide, 1)[0] == (
        "a batch of 12 samples cannot be split into micro-batches of 5 ([train] microbatch); "
        "hand over a multiple of 5 samples a call"
    )


class Own(torch.nn.Module):
    """A model that computes its loss, as Hugging Face's do."""

    def __init__(self):
        super().__init__()
        self.net = seeded()

    def forward(self, tokens, labels=None):
        self.loss = F.cross_entropy(self.net(tokens).flatten(0, 1), labels.flatten())
        return self


def own_loss(batch):
    torch.set_default_dtype(torch.float64)
    tokens, targets = batch()
    loss_1, gradients = reference_gradients(seeded(), tokens, targets)
    run = composed("[train]\nmicrobatch = 4\n", Own(), loss_fn=None)
    with run.step(0):
        loss = run.forward_backward(tokens, labels=targets)
        run.clip_grad_norm_(float("inf"))
        return float(loss - loss_1), gradient_error(run, {f"net.{name}": g for name, g in gradients.items()})


@pytest.mark.parametrize("batch", [unpadded, padded])
def test_without_loss_fn_the_loss_is_the_models_own(batch):
    loss, gradients = run_ranks(own_loss, 1, batch)[0]
    assert abs(loss) < TIGHT
    assert gradients < TIGHT
