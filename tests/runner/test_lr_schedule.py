from __future__ import annotations

import math
from pathlib import Path

import pytest

from composer3d.errors import ManifestError, ReferenceFailure
from composer3d.manifest import read_text, type_manifest
from composer3d.runner import TABLES
from composer3d.runner.lr_schedule import LRSchedule, multiplier_of
from composer3d.runner.runner_tables import LRScheduleTable


def values(num_steps, **keys):
    f = multiplier_of(LRScheduleTable(**keys), num_steps=num_steps, folder=Path(__file__).parent)
    return [f(step) for step in range(num_steps)]


def test_linear_rises_then_falls_to_the_ratio():
    assert values(6, use="linear", warmup=2, min_ratio=0.0) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert values(6, use="linear", warmup=2, min_ratio=0.2) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])


def test_cosine_falls_along_half_a_wave():
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert values(4, use="cosine", warmup=0) == pytest.approx(expected)


def test_cosine_with_five_percent_warmup_is_the_default():
    assert values(40) == values(40, use="cosine", warmup=2, min_ratio=0.1)
    assert values(40)[:3] == [0.5, 1.0, 1.0]


def test_constant_is_constant():
    assert values(40, use="constant") == [1.0] * 40
    assert values(4, use="constant", warmup=0.5) == [0.5, 1.0, 1.0, 1.0]


def test_wsd_is_stable_then_decays_over_the_last_part():
    assert values(10, use="wsd", warmup=2, decay=4, min_ratio=0.0) == [0.5] + [1.0] * 6 + [0.75, 0.5, 0.25]
    assert values(10, use="wsd", warmup=0, min_ratio=0.0) == [1.0] * 9 + [0.5]


def test_a_step_after_the_end_keeps_the_ratio():
    f = multiplier_of(LRScheduleTable(use="linear", min_ratio=0.25), num_steps=4, folder=Path())
    assert f(100) == 0.25


def halves(step, num_steps):
    return 1.0 if step < num_steps // 2 else 0.5


def test_a_callable_is_the_multiple_itself():
    assert values(4, use="test_lr_schedule:halves") == [1.0, 1.0, 0.5, 0.5]
    with pytest.raises(ReferenceFailure, match='module "test_lr_schedule" has no "thirds"'):
        values(4, use="test_lr_schedule:thirds")


class Groups:
    """Stands for an optimizer: a schedule sees nothing but its groups."""

    def __init__(self, *rates):
        self.param_groups = [{"lr": rate} for rate in rates]


def test_every_group_has_its_own_rate_and_a_resumed_schedule_the_step_s():
    optimizer = Groups(1.0, 0.5)
    schedule = LRSchedule(optimizer, lambda step: 1 / (step + 1))
    assert schedule.apply(3) == 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
    resumed = Groups(1.0, 0.5)
    LRSchedule(resumed, lambda step: 1 / (step + 1)).load_state_dict(schedule.state_dict())
    assert resumed.param_groups == optimizer.param_groups


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('use = "linear"\nname = "cosine"', "use and name are two names for one key; remove one of them"),
        ('name = "cosin"', '"cosin" is not cosine, linear, constant, wsd or "module:callable"'),
        ("decay = 0.1", 'decay is for "wsd", and this is "cosine"'),
        ('use = "constant"\nmin_ratio = 0.1', 'min_ratio is for cosine, linear and wsd, and this is "constant"'),
        ("warmup = 1.5", "warmup = 1.5 is neither a number of steps (an integer) nor a fraction of the run"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(text, message):
    document = read_text(f"composer3d = 1\ntrain.steps = 1\n[lr_schedule]\n{text}\n")
    with pytest.raises(ManifestError) as caught:
        type_manifest(document, tables=TABLES)
    assert str(caught.value) == f"<text>:3:2: [lr_schedule] {message}"


def test_name_is_another_name_for_use():
    document = read_text("composer3d = 1\ntrain.steps = 1\n", overrides=["lr_schedule.name=constant"])
    assert type_manifest(document, tables=TABLES).tables["lr_schedule"].kind == "constant"
