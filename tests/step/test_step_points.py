from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.models import composed, gradient_error, mine, padded, reference_gradients, seeded

from composer3d import StepError
from composer3d.testing import full, run_ranks

JOURNAL = '[profiling.journal]\nuse = "support.plugins:Journal"\n'
LOCKSTEP = '[mesh]\ntp = 2\n[sharding.lockstep]\nuse = "support.plugins:Lockstep"\n'
SCALED = '[precision.scaled]\nuse = "support.plugins:Scaled"\n'


def journal():
    run = composed(JOURNAL + "[train]\nmicrobatch = 6\n")
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = padded()
    with run.step(7):
        run.forward_backward(tokens, target=targets)
        run.clip_grad_norm_(1.0)
        optimizer.step()
    return [entry[0] if entry[1] == 7 else entry for entry in run.context.state["journal"]], [
        entry[2:] for entry in run.context.state["journal"] if "MICROBATCH" in entry[0]
    ]


def test_the_points_of_a_step_come_in_order():
    points, places = run_ranks(journal, 1)[0]
    assert points == [
        "BEGIN",
        *["BEFORE_MICROBATCH", "AFTER_MICROBATCH"] * 2,
        *("AFTER_BATCH", "GRADIENTS_LOCAL", "GRADIENTS_REDUCED", "UNSCALED", "DECIDE", "BEFORE_OPTIMIZER"),
        "AFTER_OPTIMIZER",
        *("PARAMETERS_SYNCHRONISED", "PARAMETERS_FINAL", "END"),
    ]
    assert places == [(0, False), (0, False), (1, True), (1, True)]


def vetoed():
    run = composed("[sharding.fsdp2]\n" + JOURNAL + "veto_rank = 1\nveto_step = 1\n")
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    weights, vetoes = [full(run.model.out.weight)], []
    for number in range(3):
        with run.step(number) as state:
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(full(run.model.out.weight).clone())
        vetoes.append(state.vetoes)
    skipped = [entry[0] for entry in run.context.state["journal"] if entry[1] == 1]
    return [torch.equal(*pair) for pair in zip(weights, weights[1:], strict=False)], vetoes, skipped[-2:]


def test_the_veto_of_one_rank_skips_the_step_on_all():
    for unchanged, vetoes, ends in run_ranks(vetoed, 2):
        assert unchanged == [False, True, False]
        assert vetoes == [(), ("journal.DECIDE",), ()]
        assert ends == ["DECIDE", "END"]


def scaled():
    tokens, targets = padded()
    reference = seeded()
    _, gradients = reference_gradients(reference, tokens, targets)
    run = composed(LOCKSTEP + SCALED)
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        with pytest.raises(StepError) as early:
            run.clip_grad_norm_(1.0)
    run.model.zero_grad()
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    errors, changed = [], []
    for number in (1, 2):
        with run.step(number) as state:
            run.forward_backward(tokens, target=targets)
            before = run.model.out.weight.detach().clone()
            if (dist.get_rank(), number) == (1, 2):
                run.model.out.weight.grad[0, 0] = float("inf")
            run.clip_grad_norm_(float("inf"))
            if number == 1:
                errors.append(gradient_error(run, gradients))
            optimizer.step()
            optimizer.zero_grad()
        changed.append(not torch.equal(before, run.model.out.weight))
    return str(early.value), errors, changed, state.vetoes, run.context.state["scaler"].log, run.has_grad_scaler


def test_a_loss_scaler_is_agreed_on():
    for early, errors, changed, vetoes, log, has_scaler in run_ranks(scaled, 2):
        assert early == "a loss scaler needs run.optimizer(...) before the first step"
        # Scaled by 4 and unscaled: nothing is rounded.
        assert errors == [0.0]
        assert changed == [True, False]
        assert vetoes == ("grad_scaler",)
        assert log == [False, True]
        assert has_scaler
