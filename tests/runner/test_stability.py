from __future__ import annotations

import math

import pytest

from composer3d.runner.stability import Stability, StabilityError
from composer3d.runner.tables import StabilityTable


def judge(stability, *losses, grad_norm=1.0):
    return [stability.judge(step, loss=loss, grad_norm=grad_norm) is not None for step, loss in enumerate(losses, 1)]


def test_what_is_not_finite_is_skipped_and_counted():
    stability = Stability(StabilityTable(on_nonfinite="skip"))
    assert judge(stability, 2.0, math.nan, math.inf, 2.0) == [False, True, True, False]
    assert judge(stability, 2.0, grad_norm=math.nan) == [True]
    assert stability.num_skipped == 3


def test_a_spike_is_measured_against_the_median_of_the_losses_that_were_taken():
    stability = Stability(StabilityTable(on_nonfinite="skip", spike_factor=2.0, spike_window=3))
    assert judge(stability, 1.0, 9.0, 1.0, 2.1, 1.9, 3.9) == [False, False, False, True, False, True]


def test_a_resumed_judge_remembers():
    table = StabilityTable(on_nonfinite="skip", spike_factor=2.0, spike_window=3)
    before, after = Stability(table), Stability(table)
    judge(before, 1.0, 1.0, 1.0, math.nan)
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict() and after.num_skipped == 1
    assert judge(after, 2.5) == [True]


def test_a_loss_scaler_deals_with_overflow_itself():
    stability = Stability(StabilityTable(), overflow_is_expected=True)
    assert judge(stability, 1.0, grad_norm=math.inf) == [False]


def test_stopping_says_where_and_what_to_do():
    with pytest.raises(StabilityError) as caught:
        Stability(StabilityTable()).judge(7, loss=1.5, grad_norm=math.inf)
    assert str(caught.value) == (
        "step 7: the gradient is not finite (loss 1.5, gradient norm inf); lower optimizer.lr or train.grad_clip, or "
        'set stability.on_nonfinite = "skip" to leave such steps out'
    )
    assert (caught.value.step, caught.value.loss, caught.value.grad_norm) == (7, 1.5, math.inf)


def test_too_many_skips_in_a_row_stop_the_run():
    stability = Stability(StabilityTable(on_nonfinite="skip", max_skips=2))
    assert judge(stability, math.nan, 1.0, math.nan) == [True, False, True]
    with pytest.raises(StabilityError) as caught:
        stability.judge(4, loss=math.nan, grad_norm=1.0)
    assert str(caught.value) == (
        "step 4: the loss is not finite (loss nan, gradient norm 1): step 2 in a row that was skipped "
        "(stability.max_skips = 2); go on from an earlier checkpoint (--resume PATH) with a lower optimizer.lr"
    )
