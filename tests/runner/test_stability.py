from __future__ import annotations

import math

import pytest
from support.training import start, write

from composer3d import RankError
from composer3d.runner.objective.stability import Stability, StabilityError
from composer3d.runner.runner_tables import StabilityTable


def judge(stability, *losses, grad_norm=1.0):
    found = []
    for step, loss in enumerate(losses, 1):
        found.append(stability.judge(step, loss=loss, grad_norm=grad_norm) is not None)
        if not found[-1]:
            stability.taken()
    return found


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


def test_steps_that_plugins_skip_count_as_skipped_in_a_row():
    stability = Stability(StabilityTable(max_skips=2), overflow_is_expected=True)
    figures = {"loss": 1.5, "grad_norm": math.inf}
    stability.judge(1, **figures)
    stability.vetoed(1, by=("grad_scaler",), **figures)
    stability.judge(2, loss=1.5, grad_norm=1.0)
    stability.taken()
    stability.vetoed(3, by=("grad_scaler",), **figures)
    with pytest.raises(StabilityError) as caught:
        stability.vetoed(4, by=("grad_scaler",), **figures)
    assert str(caught.value) == (
        "step 4: skipped by grad_scaler (loss 1.5, gradient norm inf): step 2 in a row that was skipped "
        "(stability.max_skips = 2); the loss is finite, and its gradients overflow float16 at the loss scales of these "
        "steps: begin with a lower scale, or raise stability.max_skips and let the scaler come to one; where they "
        "overflow at any, compute in bfloat16, as [precision.mixed] does by default"
    )


def test_a_loss_that_overflows_itself_is_not_the_scales_fault():
    stability = Stability(StabilityTable(max_skips=1), overflow_is_expected=True)
    with pytest.raises(
        StabilityError, match="float16 overflows in the model's own values, at any loss scale; compute in"
    ):
        stability.vetoed(1, by=("grad_scaler",), loss=math.nan, grad_norm=math.nan)


def test_a_run_without_a_step_that_was_taken_is_not_finished():
    stability = Stability(StabilityTable(on_nonfinite="skip"))
    judge(stability, math.nan, math.nan)
    with pytest.raises(StabilityError) as caught:
        stability.finish(2)
    assert str(caught.value).startswith("all 2 steps were skipped, so nothing is trained; ")
    judge(stability, 1.0)
    stability.finish(3)


OVERFLOWING = """
composer3d = 1
model.args = { dim = 16, num_layers = 1, num_heads = 2 }
data = { use = "synthetic", seq_len = 8, vocab_size = 32 }
run.device = "cpu"
[sharding.fsdp2]
[precision.mixed]
param_dtype = "float16"
initial_scale = 1e30
"""


@pytest.mark.parametrize(("steps", "said"), [(12, "step 10: skipped by grad_scaler"), (3, "all 3 steps were skipped")])
def test_float16_that_overflows_in_every_step_is_not_finished(steps, said, tmp_path):
    path = write(tmp_path, f"{OVERFLOWING}[train]\nsteps = {steps}\n")
    with pytest.raises(RankError) as caught:
        start(path, 2)
    assert said in str(caught.value)


MASKED = """
import torch


class Masked(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.arange(8), torch.full((8,), -100)
"""


@pytest.mark.parametrize("more", ["", '[stability]\non_nonfinite = "skip"\nmax_skips = 2\n'], ids=["stop", "skip"])
def test_a_batch_without_a_valid_target_says_so(more, tmp_path):
    (tmp_path / "masked_rows.py").write_text(MASKED)
    text = OVERFLOWING.partition("[precision")[0].replace('"synthetic"', '"masked_rows:Masked"')
    path = write(tmp_path, f"{text}[train]\nsteps = 4\n{more}")
    with pytest.raises(RankError) as caught:
        start(path, 2)
    step = 2 if more else 1
    said = f"step {step}: no target of the global batch is valid (every one is -100), so there is no loss (loss nan"
    assert said in str(caught.value)
