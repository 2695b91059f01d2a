"""A whole run from the time of a step: days, money, energy, and what failures cost."""

from __future__ import annotations

import json
import math

import pytest

from composer3d.errors import ComposerError
from composer3d.planning.costs.figure import Figure
from composer3d.planning.costs.whole_run import Failures, Questions, reliability, training

STEP = Figure.within(2.0, 0.25, "modelled")


def test_a_budget_of_tokens_takes_days_money_and_energy():
    run = training(STEP, Questions(num_units=1e9 + 1, price=2.5), units=10**6, world_size=8, power_w=700)
    assert run.num_steps == 1001
    hours = 1001 * 2.0 * 8 / 3600
    assert run.device_hours.value == pytest.approx(hours)
    assert run.cost.value == pytest.approx(2.5 * hours)
    assert run.days.value == pytest.approx(hours / 8 / 24)
    assert run.energy_mwh.value == pytest.approx(hours * 700e-6)
    report = json.loads(json.dumps(run.to_json()))
    assert report["cost"]["low"] < report["cost"]["value"] < report["cost"]["high"]


def test_what_is_not_known_is_left_out():
    run = training(STEP, Questions(num_units=1), units=1, world_size=1)
    assert run.cost is None and run.energy_mwh is None


def simulated_goodput(*, save_s, interval_s, failure_s, restart_s, failures):
    """Return the part of the time that is kept; failures come at equal distances, on average in mid-interval."""
    kept = spent = 0.0
    for index in range(failures):
        length = failure_s - restart_s
        whole = math.floor((length - (index + 0.5) / failures * interval_s) / (interval_s + save_s))
        kept += whole * interval_s
        spent += failure_s
    return kept / spent


def test_goodput_is_that_of_a_simulated_run_and_no_other_interval_keeps_more():
    failures = Failures(hours=40_000, storage=50e9, restart_s=300)
    found = reliability(STEP, failures, checkpoint_bytes=10**12, world_size=1024)
    assert found.save_s == 20 and found.failure_s == pytest.approx(40_000 * 3600 / 1024)
    assert found.interval_s == pytest.approx(math.sqrt(2 * 20 * found.failure_s) - 20)
    given = {"save_s": 20, "failure_s": found.failure_s, "restart_s": 300, "failures": 1000}
    kept = simulated_goodput(interval_s=found.interval_s, **given)
    assert found.goodput.value == pytest.approx(kept, abs=0.01)
    assert all(kept >= simulated_goodput(interval_s=times * found.interval_s, **given) for times in (0.25, 4.0))


def test_the_interval_keeps_most_where_a_save_takes_long():
    failures = Failures(hours=40_000, storage=1e9, restart_s=60)
    found = reliability(STEP, failures, checkpoint_bytes=8 * 10**12, world_size=1024)
    assert found.save_s == 8_000

    def lost(interval_s):
        return found.save_s / (interval_s + found.save_s) + (interval_s / 2 + 60) / found.failure_s

    assert found.goodput.value == pytest.approx(1 - lost(found.interval_s))
    assert lost(found.interval_s) < min(lost(0.97 * found.interval_s), lost(1.03 * found.interval_s))


def test_a_run_with_failures_takes_as_much_longer_as_less_is_kept():
    run = training(STEP, Questions(num_units=1e9, price=2.0), units=10**6, world_size=8, power_w=700)
    longer = run.interrupted_by(Figure(value=0.8, known="modelled", low=0.7, high=0.9)).to_json()["with_failures"]
    for name in ("days", "device_hours", "cost", "energy_mwh"):
        assert longer[name]["value"] == pytest.approx(getattr(run, name).value / 0.8)
    assert longer["num_steps"] == run.num_steps


def test_an_interval_is_at_least_a_step():
    found = reliability(STEP, Failures(hours=1e6, storage=1e12), checkpoint_bytes=1, world_size=1)
    assert found.interval_steps >= 1 and found.interval_s >= 2.0


@pytest.mark.parametrize(
    ("restart_s", "remedy"), [(300, "or restart fewer seconds"), (10, "or storage more bandwidth")]
)
def test_a_world_that_keeps_nothing_is_refused(restart_s, remedy):
    failures = Failures(hours=10, storage=1e9, restart_s=restart_s)
    with pytest.raises(ComposerError) as caught:
        reliability(STEP, failures, checkpoint_bytes=10**12, world_size=1000)
    assert str(caught.value) == (
        f"failures: 1000 devices fail every 36 s, and a save of 1e+03 GB takes 1000 s, a restart {restart_s} s: "
        f"nothing would be kept; give failures more hours, {remedy}"
    )
