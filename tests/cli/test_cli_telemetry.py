"""A run from its manifest, and what a real OTLP receiver gets of it."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict

from support.collectors import oteltap

from composer3d.cli import main
from composer3d.processes.forking import limit_ranks

TABLES = """
[evaluation]
every = 2
[profiling.throughput]
peak_tflops = 0.1
[profiling.opentelemetry]
exporter = "otlp"
"""
METRICS = """
loss grad_norm lr tokens tokens_per_s step_time_s data_wait_s skipped_steps steps memory.resident spans.lost
mfu_6n hfu_counted step_time_p50_s step_time_p95_s step_time_p99_s collective_gib_per_s_dp_shard
"""


def rows_of(received, wanted):
    """Return what was received once all of the spans are there; the receiver writes in its own time."""
    deadline = time.monotonic() + 250
    while True:
        rows = [json.loads(line) for line in received.read_text().splitlines() if line.endswith("}")]
        if {row.get("name") for row in rows} >= wanted or time.monotonic() > deadline:
            return rows


def test_a_real_receiver_has_the_whole_run(folder, tmp_path_factory):
    with (folder / "run.toml").open("a") as file:
        file.write(TABLES)
    wanted = {f"composer3d.{name}" for name in METRICS.split()}
    with oteltap(tmp_path_factory.mktemp("tap")) as (url, received), limit_ranks(2):
        options = ["run.output=out", "train.steps=4", f"profiling.opentelemetry.endpoint={url}"]
        assert main(["run", "run.toml", *(part for option in options for part in ("--set", option))]) == 0
        rows = rows_of(received, {"run", *wanted})
    spans = {row["spanId"]: row for row in rows if "spanId" in row}
    assert {row["name"] for row in rows} - {span["name"] for span in spans.values()} >= wanted
    assert len({span["traceId"] for span in spans.values()}) == 1
    (run,) = [span for span in spans.values() if span["name"] == "run"]
    below = defaultdict(Counter)
    for span in spans.values():
        above = spans.get(span.get("parentSpanId", ""))
        below["" if above is None else above["name"]][span["name"]] += 1
    # Two ranks, four steps, two evaluations; the last step is saved.
    assert below[""] == {"run": 1} and below["run"]["step"] == 2 * 4
    assert below["run"]["data_wait"] >= 2 * 4 and below["run"]["evaluate"] == 2 * 2 and below["run"]["checkpoint"] == 2
    assert below["step"]["optimizer"] == below["step"]["forward_backward"] == 2 * 4
    assert below["forward_backward"] == {"forward": 2 * 4, "backward": 2 * 4}
    assert below["backward"] == {"all_gather": 2 * 4, "reduce_scatter": 2 * 4}
    told = json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert told["mfu_6n"] > 0 and told["data_wait_s"] > 0 and run["name"] == "run"
