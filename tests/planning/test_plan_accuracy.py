"""The plan against published runs: what the benchmark prints holds the bounds that benchmarks/README.md states."""

from __future__ import annotations

import json

import plan_accuracy
import pytest
from published import published_runs


@pytest.fixture(scope="module")
def runs():
    return published_runs()


def held_out(runs, what):
    errors = []
    for run in runs:
        measured = run.step_s if what == "time" else run.memory_gib
        if measured is None or plan_accuracy.is_fitted(run, what):
            continue
        errors.append(plan_accuracy.time_error(run) if what == "time" else plan_accuracy.memory_gib(run) / measured - 1)
    return errors


@pytest.mark.parametrize(("what", "at_least"), [("time", 140), ("memory", 30)])
def test_held_out_runs_are_within_the_targets(runs, what, at_least):
    errors = held_out(runs, what)
    assert len(errors) >= at_least
    median, ninety = plan_accuracy.quantiles(errors)
    assert median <= plan_accuracy.TARGETS[what][0]
    assert ninety <= plan_accuracy.TARGETS[what][1]


@pytest.mark.parametrize("what", ["time", "memory"])
def test_at_most_a_third_is_fitted(runs, what):
    measured = [run for run in runs if (run.step_s if what == "time" else run.memory_gib) is not None]
    assert sum(plan_accuracy.is_fitted(run, what) for run in measured) <= len(measured) / 3


def test_what_ran_out_of_memory_does_not_fit(runs):
    (run,) = [run for run in runs if run.ran_out]
    assert plan_accuracy.memory_gib(run) * plan_accuracy.GIB > run.hardware.device.memory_bytes


@pytest.mark.parametrize(("stages", "microbatches", "measured", "times"), plan_accuracy.BUBBLES)
def test_bubbles_are_within_two_points(stages, microbatches, measured, times):
    assert plan_accuracy.bubble(stages, microbatches, times) == pytest.approx(measured, abs=0.02)


def test_the_report_of_another_folder(tmp_path):
    data = json.loads((plan_accuracy.DATA / "published_runs.json").read_text())
    data["records"] = [row for row in data["records"] if row["id"] in ("v0128", "v0102", "v0805", "v0738")]
    (tmp_path / "published_runs.json").write_text(json.dumps(data))
    rows = plan_accuracy.report(tmp_path, verbose=True)
    assert sum(row.startswith("time     BLOOM") and "1 runs" in row for row in rows) == 1
    assert any("v0102 ran out" in row for row in rows)
    assert any(row.startswith("    v0805") for row in rows)
    assert len([row for row in rows if "all held out" in row]) == 2
