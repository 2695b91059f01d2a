"""The plan against published runs: what the benchmark prints holds the bounds that benchmarks/README.md states."""

from __future__ import annotations

import json
from dataclasses import replace

import plan_accuracy
import pytest
from decoder_block import embedding, head
from decoder_shape import ModelShape
from decoder_traces import static_traces
from published import published_runs

from composer3d.planning.costs.timing import estimate
from composer3d.planning.formulas.layout_numbers import Setup
from composer3d.planning.hardware.hardware_file import load_hardware


@pytest.fixture(scope="module")
def runs():
    return published_runs()


@pytest.fixture(scope="module")
def time_errors(runs):
    return {run.name: plan_accuracy.time_error(run) for run in runs if run.step_s is not None}


def held_out(runs, what, time_errors):
    errors = []
    for run in runs:
        measured = run.step_s if what == "time" else run.memory_gib
        if measured is None or plan_accuracy.is_fitted(run, what):
            continue
        errors.append(time_errors[run.name] if what == "time" else plan_accuracy.memory_gib(run) / measured - 1)
    return errors


@pytest.mark.parametrize(("what", "at_least"), [("time", 200), ("memory", 40)])
def test_held_out_runs_are_within_the_targets(runs, time_errors, what, at_least):
    errors = held_out(runs, what, time_errors)
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


def test_nine_of_ten_held_out_runs_lie_within_the_band_of_their_stack(runs, time_errors):
    errors = {}
    for run in runs:
        if run.step_s is not None and not plan_accuracy.is_fitted(run, "time"):
            device = plan_accuracy.hardware_of(run)
            errors.setdefault((plan_accuracy.BAND_OF.get(device, device), run.stack), []).append(run)
    known = {}
    for (device, stack), held in errors.items():
        band = load_hardware(device).with_stack(stack).software.band
        assert (band is None) is (len(held) < 5), (device, stack)
        if band is not None:
            known[device, stack] = [plan_accuracy.is_within(time_errors[run.name], band) for run in held]
    assert {("h100", "compiled"), ("h100", "eager"), ("h100", "megatron"), ("gb300", "megatron")} <= known.keys()
    for key, inside in known.items():
        assert sum(inside) >= 0.9 * len(inside), key


def test_bytes_of_a_logit_and_what_an_embedding_keeps():
    shape = ModelShape(
        num_layers=2, hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn=128, vocab_size=1000, tied=True
    )
    setup = Setup(seq_len=128, global_batch=1, tp=2)
    kept = {}
    for name in ("eager", "compiled", "compiled loss"):
        kernels = "eager" if name == "eager" else "compiled"
        work = head(shape, replace(setup, kernels=kernels, loss=name if "loss" in name else ""))
        hidden_bytes = 2 * 128 * 64
        kept[name] = (work.saved_bytes + work.working_bytes - hidden_bytes) / (128 * 1000 / 2)
    assert kept == {"eager": 16, "compiled": 14, "compiled loss": 4}
    assert embedding(shape, setup).saved_bytes == 8 * 128  # ids; the result is what the first block keeps


def test_tensor_parallelism_over_two_nodes_reaches_a_part_of_what_it_does_in_one():
    shape = ModelShape(
        num_layers=8,
        hidden=12288,
        num_heads=96,
        num_kv_heads=96,
        head_dim=128,
        ffn=49152,
        vocab_size=51200,
        gated=False,
    )
    setup = Setup(seq_len=2048, global_batch=1, zero=0, kernels="fused")
    seconds = {
        tp: estimate(
            static_traces(shape, replace(setup, tp=tp)), load_hardware("a100-80"), world_size=tp, tokens=2048
        ).step_s.value
        for tp in (8, 16)
    }
    assert 0.6 <= seconds[8] / seconds[16] / 2 <= 0.8


SWEEPS = plan_accuracy.sweeps(published_runs())


@pytest.mark.parametrize("name", SWEEPS)
def test_the_layout_that_is_planned_fastest_is_within_5_percent_of_the_fastest(name):
    regret, tau = plan_accuracy.ranking(SWEEPS[name])
    assert regret <= 0.05
    assert tau > 0


@pytest.mark.parametrize(("stages", "microbatches", "measured", "times"), plan_accuracy.BUBBLES)
def test_bubbles_are_within_two_points(stages, microbatches, measured, times):
    assert plan_accuracy.bubble(stages, microbatches, times) == pytest.approx(measured, abs=0.02)


def test_the_report_of_another_folder(tmp_path):
    data = json.loads((plan_accuracy.DATA / "published_runs.json").read_text())
    data["records"] = [row for row in data["records"] if row["id"] in ("v0128", "v0102", "v0805", "v0738")]
    (tmp_path / "published_runs.json").write_text(json.dumps(data))
    data["tables"] = []
    (tmp_path / "published_runs.json").write_text(json.dumps(data))
    rows = plan_accuracy.report(tmp_path, verbose=True)
    assert sum(row.startswith("time     a100-80 megatron, BLOOM") and "1 runs" in row for row in rows) == 1
    assert any("v0102 ran out" in row for row in rows)
    assert any(row.startswith("    v0805") for row in rows)
    assert len([row for row in rows if " all held out  " in row]) == 2
