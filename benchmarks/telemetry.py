"""What OpenTelemetry costs in a step at each detail, as CPU time: noting, making spans, writing or encoding them.

The step is that of FSDP2 with four blocks and the root on two micro-batches: its spans are opened and closed on the
plugin's own recorder, its batch is made into spans and written by the plugin's own exporter, all in one thread, whose
CPU time is read. The least of many repetitions counts, so that other work on the machine does not: there, what is
measured here is spread over the step and the exporting thread. `otlp` is encoding for a collector in place of writing a
file; sending it comes on top, once an export.

The default detail, `phase`, may take 1 % of a step of 50 ms: 500 microseconds.

Usage: python benchmarks/telemetry.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from composer3d_plugins.profiling.opentelemetry.exporters import make_exporters
from composer3d_plugins.profiling.opentelemetry.span_recorder import Batch, SpanRecorder
from composer3d_plugins.profiling.opentelemetry.traces import Identity, Tracing
from harness import conditions, say
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

BUDGET_US = 500.0
NUM_BLOCKS, NUM_MICROBATCHES = 4, 2
DETAILS = ("step", "phase", "microbatch", "layer")


class Step:
    """Opens and closes the spans of a step."""

    def __init__(self, recorder: SpanRecorder, *, blocks: bool) -> None:
        self._recorder, self._blocks = recorder, blocks

    def one(self, name: str, **attributes: object) -> None:
        self._recorder.end(self._recorder.begin(name, attributes))

    def run(self, number: int) -> None:
        recorder = self._recorder
        step = recorder.begin("step", {"step": number})
        self.one("all_reduce", group="counts", axis="world")
        both = recorder.begin("forward_backward", {"microbatches": NUM_MICROBATCHES})
        for microbatch in range(NUM_MICROBATCHES):
            forward = recorder.begin("forward", {"microbatch": microbatch})
            self.units("block", "all_gather", NUM_BLOCKS + 1)
            recorder.end(forward)
            backward = recorder.begin("backward", {"microbatch": microbatch})
            self.units("block_backward", "all_gather", NUM_BLOCKS)
            for unit in range(NUM_BLOCKS + 1):
                self.one("reduce_scatter", bytes=1024, axis="dp_shard", unit=f"layers.{unit}")
            recorder.end(backward)
        recorder.end(both)
        for group in ("loss", "norm"):
            self.one("all_reduce", group=group, axis="world")
        self.one("optimizer")
        recorder.end(step)

    def units(self, name: str, op: str, num_units: int) -> None:
        for unit in range(num_units):
            block = self._recorder.begin(name, {"block": f"layers.{unit}"}) if self._blocks else None
            self.one(op, bytes=1024, axis="dp_shard", unit=f"layers.{unit}")
            self._recorder.end(block)


def measure(detail: str, repetitions: int, folder: Path) -> dict[str, object]:
    """Return the least CPU microseconds of every part of a step."""
    batches: list[Batch] = []
    recorder = SpanRecorder(batches.append, only=frozenset({"step"}) if detail == "step" else None)
    step = Step(recorder, blocks=detail == "layer")
    tracing = Tracing(
        Identity.make(None),
        is_first=True,
        resource=Resource({"service.name": "composer3d"}),
        merged=detail in ("step", "phase"),
        rotate_steps=1000,
        attributes={},
    )
    exporters = make_exporters(
        "file", protocol="http", endpoint=None, headers={}, timeout_s=5.0, folder=folder, rank=DETAILS.index(detail)
    )
    least = [float("inf")] * 4
    for number in range(repetitions):
        batches.clear()
        times = [time.thread_time_ns()]
        step.run(number)
        times.append(time.thread_time_ns())
        spans = tracing.convert(batches[0])
        times.append(time.thread_time_ns())
        exporters.spans(spans)
        times.append(time.thread_time_ns())
        encode_spans(spans).SerializeToString()
        times.append(time.thread_time_ns())
        least = [min(known, (b - a) / 1000) for known, a, b in zip(least, times[:-1], times[1:], strict=True)]
    exporters.close()
    noting, making, writing, encoding = least
    return {
        "name": detail,
        "spans": len(spans),
        "noting_us": round(noting, 1),
        "file_us": round(noting + making + writing, 1),
        "otlp_us": round(noting + making + encoding, 1),
        "budget_us": BUDGET_US if detail == "phase" else None,
    }


def main() -> None:
    """Read the command line, measure, print; exit code 1 above the budget."""
    parser = argparse.ArgumentParser(description="Measure what telemetry costs at each detail.")
    parser.add_argument("--repetitions", type=int, default=1000, help="steps at each detail; default 1000")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = conditions()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(detail, arguments.repetitions, Path(folder)) for detail in DETAILS]
    if arguments.json:
        found["load_1min_after"] = round(os.getloadavg()[0], 2)
        say(json.dumps({"rows": rows, "conditions": found}, indent=1))
    else:
        for row in rows:
            say(
                f"{row['name']}: {row['spans']} spans, {row['noting_us']} microseconds in the step; "
                f"in all {row['file_us']} to a file, {row['otlp_us']} as OTLP"
            )
    phase = rows[DETAILS.index("phase")]
    raise SystemExit(1 if max(float(str(phase[key])) for key in ("file_us", "otlp_us")) > BUDGET_US else 0)


if __name__ == "__main__":
    main()
