"""Figures of benchmarks/README.md are those in benchmarks/results, with their conditions."""

from __future__ import annotations

from collections import Counter

import communication
import harness
import house
import layout_matrix
import plugin_matrix
import pytest
from support.documents import read, recorded, table

FIGURES = read("benchmarks/README.md")


def test_figures_are_those_measured():
    step, *dimensions = recorded("step_time")["rows"]
    hooks, engine = recorded("hook_overhead")["rows"]
    (guard,) = recorded("guard_cost")["rows"]
    (offload,) = recorded("offload")["rows"]
    stall = recorded("save_stall")
    telemetry = {row["name"]: row for row in recorded("telemetry")["rows"]}["phase"]
    commands = {row["name"]: row for row in recorded("quickstart")["rows"]}
    start = recorded("slurm_start")["rows"][-1]
    quickstart, check = commands["quickstart"], commands["check, CPU beyond import torch"]
    *layouts, large = recorded("layout_time")["rows"]
    assert len(layouts) == 4 and large["name"] == "check"
    assert all(row["cpu_s"] <= row["budget_s"] for row in [*layouts, large])

    def compared(ratio, control, row=step):
        return f"{row[ratio]:.3f} (control {row[control]:.3f})"

    shown = {row[0]: row[1] for row in table(FIGURES, "figure", "measured", "limit", "command")}
    assert shown == {
        "median step time over hand-written FSDP2": compared("ratio", "control"),
        "process CPU time a step over hand-written FSDP2": compared("cpu_ratio", "cpu_control"),
        "peak resident memory over hand-written FSDP2": f"{step['rss_ratio']:.3f}",
        "largest difference of losses": f"{step['loss_abs']:.1e}",
        "lines added or changed to embed": str(step["lines"]),
        **{
            f"median step time over torch's own calls, {row['name']}": compared("ratio", "control", row)
            for row in dimensions
        },
        **{
            f"process CPU time a step of it, {row['name']}": compared("cpu_ratio", "cpu_control", row)
            for row in dimensions
        },
        **{f"largest difference of losses, {row['name']}": f"{row['loss_abs']:.1e}" for row in dimensions},
        "what hooks of 5 plugins add to a step": f"{hooks['us']:.0f} microseconds",
        "the rest of a step's bookkeeping": f"{engine['us']:.0f} microseconds",
        "what the step guard adds to the count's all-reduce": (
            f"{guard['us']:.0f} microseconds of CPU time, {guard['percent']:.3f} % of 100 ms"
        ),
        "CPU time of `opentelemetry` a step, default detail": (
            f"{telemetry['file_us']:.0f} microseconds to files, {telemetry['otlp_us']:.0f} as OTLP"
        ),
        "bandwidth of optimizer state on disk, 100 million parameters, over a probe of the disk": (
            f"{offload['ratio']:.2f} ({offload['mib_per_s']} MiB/s and {offload['probe_mib_per_s']})"
        ),
        "`sbatch` to the first step of two ranks on two Slurm nodes of this machine, beside other work": (
            f"{start['seconds']:.1f} s (slowest {max(start['every_s']):.1f} s)"
        ),
        "stall of an asynchronous save of 256 MiB over a synchronous one": (
            f"{stall['stall_over_synchronous']:.4f} (worst {stall['worst']:.4f})"
        ),
        "`composer3d run quickstart`, whole": f"{quickstart['seconds']:.0f} s",
        "last loss over first loss of it": f"{quickstart['loss_ratio']:.2f} ({quickstart['steps']} steps)",
        "first step of 8 ranks": f"{commands['first step, 8 ranks']['seconds']:.1f} s",
        "`composer3d check quickstart`, CPU beyond `import torch`": f"{check['seconds']:.2f} s",
        "80 blocks of Llama-3-70B laid out on one of 512 ranks, CPU": f"{max(row['cpu_s'] for row in layouts):.1f} s",
        "`composer3d check` of it, CPU": f"{large['cpu_s']:.1f} s",
        "`composer3d verify` of two blocks of SmolLM2-135M's shape, 2 ranks, CPU of all processes": (
            f"{recorded('verify_time')['rows'][0]['cpu_s']:.1f} s"
        ),
        **{
            f"`composer3d plan` of {row['name']}, whole": f"{row['seconds']:.1f} s (slowest {row['slowest_s']:.1f} s)"
            for row in recorded("plan_time")["rows"]
        },
    }


def test_the_summaries_of_the_matrices_are_those_of_their_runs():
    layouts, plugins = recorded("layout_matrix"), recorded("plugin_matrix")
    assert harness.with_marked(FIGURES, "layouts", layout_matrix.summary(layouts)) == FIGURES
    assert harness.with_marked(FIGURES, "plugins", plugin_matrix.summary(plugins)) == FIGURES
    pending = recorded("plugin_matrix_pending")
    assert harness.with_marked(FIGURES, "pending", plugin_matrix.summary(pending)) == FIGURES
    assert [FIGURES.count(f"<!-- {name} -->") for name in ("layouts", "plugins", "pending")] == [1, 1, 1]
    # They are whole, and nothing failed.
    cells = {str(cell): cell.context for cell in layout_matrix.cells()}
    found = [row["cell"] for row in layouts["cells"]]
    assert found == [cell for cell, context in cells.items() if context == "cp1"]
    shared = recorded("layout_matrix_cp")
    outcomes = {row["cell"]: row["outcome"] for row in shared["cells"]}
    assert outcomes.keys() == {cell for cell, context in cells.items() if context != "cp1"}
    assert len(outcomes) == len(shared["cells"]) and {row["run"] for row in shared["cells"]} == set(
        range(len(shared["runs"]))
    )
    counts = Counter(outcomes.values())
    assert {name: number for name, number in shared["summary"].items() if number} == counts
    assert f"Its {len(outcomes)} layouts with `cp` above 1 are all on record" in FIGURES
    assert f"{counts['proven']} proven,\n0 failed, {counts['refused']} refused as they must be" in FIGURES
    assert layouts["summary"]["failed"] == plugins["summary"]["failed"] == plugins["summary"]["left"] == 0


def test_the_table_of_what_travels_is_the_one_measured():
    report = recorded("communication")
    assert harness.with_marked(FIGURES, "communication", communication.summary(report)) == FIGURES
    assert FIGURES.count("<!-- communication -->") == 1
    rows = {row["name"]: row for row in report["rows"]}
    plain, torchs, ours, least = (
        rows[f"shards: {name}"] for name in ("float32", "bf16 of torch", "bf16", "int4, int8 weights")
    )
    assert ours["error"] < torchs["error"] / 2 and ours["mib_on_wire"] < torchs["mib_on_wire"]
    assert least["mib_on_wire"] < plain["mib_on_wire"] / 5


def test_the_table_of_steps_at_a_limited_bandwidth_is_the_one_measured():
    report = recorded("communication_bandwidth")
    text = communication.limited_summary(report)
    assert harness.with_marked(FIGURES, "communication_bandwidth", text) == FIGURES
    assert FIGURES.count("<!-- communication_bandwidth -->") == 1
    rows = {row["name"]: row for row in report["rows"]}
    assert report["mbit"] == 1000 and rows["shards: int8"]["times_faster"] >= 2


def test_the_shape_of_the_tree_is_the_one_counted():
    assert harness.with_marked(FIGURES, "house", house.summary(recorded("house"))) == FIGURES
    assert FIGURES.count("<!-- house -->") == 1


def test_what_a_run_of_the_layouts_says():
    rows = [
        {"cell": "a", "outcome": "proven", "detail": "", "largest": {"loss": 1.5e-16, "gradients": 2e-14}},
        {"cell": "b", "outcome": "refused", "detail": "too few", "largest": {}},
    ]
    stated = {"date": "2026-01-02", "machine": "2 cores", "python": "3.11.7", "torch": "2.13.0"}
    told = layout_matrix.summary(layout_matrix.report(rows, stated, 600.0))
    assert told == (
        "Of 2 layouts 1 are proven, 1 refused as they must be (1 for too few), 0 failed.\n"
        "Largest relative differences from one device: loss 1.5e-16, gradients 2.0e-14.\n"
        "Run on 2026-01-02 in 10 minutes: 2 cores; Python 3.11.7, torch 2.13.0.\n"
    )


def test_what_the_loss_of_the_machine_that_serves_costs_is_on_record():
    found = recorded("server_faults")
    gap, back = found["gap_s"], found["back_s"]
    text = " ".join(FIGURES.split())
    assert (found["ended"], found["signal"], found["steps_missing"]) == ("finished", "KILL", 0)
    assert (
        f"Of {found['kills']} kills {found['went_on']} were survived, in {found['steps']} steps of which none is "
        f"missing, and the losses differ from those of one undisturbed device by {found['loss_difference']:.1e} of "
        f"their size. Those that were left made their next step {gap['median']:.2f} s after the kill (median; longest "
        f"{gap['worst']:.2f} s) at a step of {found['step_ms'] / 1e3:.2f} s, and the lost machine was in step again "
        f"after {back['median']:.1f} s (longest {back['worst']:.1f} s)."
    ) in text
    assert f"at a load of {found['conditions']['load_1min_before']:.0f} on 2 cores" in text


@pytest.mark.parametrize(
    "name",
    [
        "step_time",
        "hook_overhead",
        "guard_cost",
        "telemetry",
        "offload",
        "quickstart",
        "slurm_start",
        "server_faults",
        "layout_time",
        "plan_time",
        "verify_time",
    ],
)
def test_results_state_their_conditions(name):
    found = recorded(name)["conditions"]
    assert found.keys() >= {"date", "machine", "python", "torch", "load_1min_before"}
    line = f"{found['machine']}; Python {found['python']}, torch {found['torch']}"
    assert line in " ".join(FIGURES.split()) and found["date"] in FIGURES
