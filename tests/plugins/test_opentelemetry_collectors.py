"""Collectors of all kinds, good and bad, and the console."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
from composer3d_plugins.profiling.opentelemetry.courier import Counts
from support.collectors import collector, oteltap
from support.telemetry import FSDP, table, train

from composer3d.testing import run_ranks


def test_a_real_receiver_gets_every_span_and_metric(tmp_path):
    with oteltap(tmp_path) as (url, received):
        results = run_ranks(train, 2, FSDP + table(exporter="otlp", endpoint=url))
        made = sum(counts["made"] for counts, _ in results)
        deadline = time.monotonic() + 250
        while True:  # the receiver writes to its file in its own time
            rows = [json.loads(line) for line in received.read_text().splitlines() if line.endswith("}")]
            spans = [row for row in rows if "spanId" in row]
            metrics = {row.get("name") for row in rows} - {span["name"] for span in spans}
            if len(spans) >= made and len(metrics) > 6 or time.monotonic() > deadline:
                break
    assert len(spans) == made and len({span["traceId"] for span in spans}) == 1
    assert sum(counts["delivered"] for counts, _ in results) == made
    assert Counter(span["name"] for span in spans)["step"] == 4
    names = {"loss", "tokens", "tokens_per_s", "grad_norm", "skipped_steps", "memory.resident", "spans.lost", "steps"}
    assert {f"composer3d.{name}" for name in names} <= metrics


def test_grpc_and_a_collector_that_refuses_some(tmp_path, capfd):
    with collector("grpc") as (url, stop):
        results = run_ranks(train, 2, FSDP + table(exporter="otlp", protocol="grpc", endpoint=url))
        received = stop()
    spans = [line.split() for line in received if not line.startswith("metric")]
    assert len({trace for trace, _ in spans}) == 1
    for counts, _ in results:
        assert (counts["refused"], counts["delivered"]) == (2, counts["made"] - 2)
    assert len(spans) == sum(counts["delivered"] for counts, _ in results)
    assert "metric composer3d.loss" in received


def told_and_trained(text, steps):
    """Train on a rank; return what became of its spans, how long steps took, all in all too, and what was warned of."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("composer3d_plugins.profiling.opentelemetry.courier").addHandler(handler)
    started = time.perf_counter()
    counts, times = train(text, steps=steps)
    return counts, times, time.perf_counter() - started, told


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dead", "could not be sent"),
        ("error", "could not be sent"),
        ("html", "what answers there is no OTLP collector: '<html><body>It works!"),
        ("partial", "quota"),
        ("silent", "could not be sent"),
    ],
)
def test_bad_collectors_cost_nothing_and_are_told(kind, reason, tmp_path):
    # Only an answer that never comes lets an export take its whole time.
    timeout_s = 4.0 if kind == "silent" else 0.5
    options = {"exporter": "otlp", "timeout_s": timeout_s, "interval_s": 0.01}
    with nullcontext(("http://127.0.0.1:9", None)) if kind == "dead" else collector(kind) as (url, _):
        counts, times, total, told = run_ranks(told_and_trained, 1, table(endpoint=url, **options), 20)[0]
    lost = Counts(**counts).lost
    if kind == "partial":
        assert (
            counts["refused"] >= 2
            and counts["made"] == counts["delivered"] + counts["refused"] == lost + counts["delivered"]
        )
    else:
        assert counts["delivered"] == 0 and lost == counts["made"] + counts["unconverted"] + counts["overflowed"] > 0
    # No step waits for an export, which takes four seconds; closing waits for one at most.
    if kind == "silent":
        assert max(times[1:]) < timeout_s and total - sum(times) < 2 * timeout_s
    assert told and reason in told[-1] and f"{lost} spans are lost" in told[-1]


def test_a_full_queue_drops_and_counts_and_tells(tmp_path):
    options = {"exporter": "otlp", "timeout_s": 0.5, "interval_s": 0.01, "queue_size": 20}
    with collector("silent") as (url, _):
        counts, _, _, told = run_ranks(told_and_trained, 1, table(endpoint=url, **options), 30)[0]
    assert counts["overflowed"] > 0 and counts["delivered"] == 0
    everything = counts["overflowed"] + counts["unconverted"]
    assert 0 < everything <= counts["recorded"]
    lost = f"{Counts(**counts).lost} spans are lost ({counts['overflowed']} found the queue full, "
    assert lost in told[-1]


def test_the_console(tmp_path, capfd):
    run_ranks(partial(train, steps=1), 1, table(exporter="console"))
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert {"step", "forward", "run"} <= {line.get("name") for line in lines}
