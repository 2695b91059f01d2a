"""Times of hosts and devices, and what becomes of spans that are left open."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial

import pytest
from composer3d_plugins.profiling.opentelemetry.span_recorder import Batch, DeviceClock, Record, SpanRecorder
from composer3d_plugins.profiling.opentelemetry.traces import Identity, merge
from support.telemetry import table, train
from support.trace_files import read

from composer3d.testing import run_ranks


class Mark:
    """A mark in the stream of a device that is `lag` behind the host; the device comes to marks when it is told."""

    now_ms, reached_ms = 0.0, 0.0

    def record(self):
        self.at = Mark.now_ms + 5.0

    def query(self):
        return Mark.reached_ms >= self.at

    def elapsed_time(self, later):
        assert self.query() and later.query()
        return later.at - self.at


def test_marks_of_a_device_become_times_without_waiting():
    Mark.now_ms = Mark.reached_ms = 0.0
    batches = []
    recorder = SpanRecorder(batches.append, make_event=Mark)
    anchor = Mark()
    anchor.record()
    step = recorder.begin("step", {"step": 0})
    Mark.now_ms = 1.0
    forward = recorder.begin("forward", {})
    Mark.now_ms = 3.0
    recorder.end(forward)
    wait = recorder.begin("data_wait", {})
    recorder.end(wait)
    recorder.end(step)
    (batch,) = batches
    assert [record.is_ready for record in batch.records] == [False, True, False]
    Mark.reached_ms = 100.0
    clock = DeviceClock(anchor, 1_000_000_000)
    by_name = {merged.first.name: merged for merged in merge(batch.records, clock, together=True)}
    assert (by_name["forward"].start_ns, by_name["forward"].end_ns) == (1_001_000_000, 1_003_000_000)
    assert by_name["forward"].attributes == {"clock": "device"} and by_name["data_wait"].attributes == {}
    clock.move_to(step.end_event)
    assert clock.time_ns(forward.begin_event) == 1_001_000_000


@pytest.mark.gpu
def test_a_run_on_a_gpu_has_device_times(tmp_path):
    run_ranks(partial(train, steps=3), 1, table(tmp_path), backend="cpu:gloo,cuda:nccl")
    _, spans = read(tmp_path / "rank-0.jsonl")
    assert {span.attributes.get("clock") for span in spans if span.name in ("forward", "step")} == {"device"}


def test_spans_left_open_by_an_exception_end_with_what_is_around_them():
    batches = []
    recorder = SpanRecorder(batches.append)
    step = recorder.begin("step", {"step": 0})
    recorder.begin("forward", {})
    recorder.end(step)
    other = recorder.begin("step", {"step": 1})
    recorder.end(other)
    assert [[record.name for record in batch.records] for batch in batches] == [["step"], ["step"]]
    assert other.parent is None and batches[1].num_steps == 2
    assert isinstance(batches[0], Batch) and isinstance(other, Record)


def test_every_rank_derives_the_same_segments():
    identity = Identity.make(None)
    assert Identity.make("not one").parent_id is None
    assert identity.segment(0) is identity and identity.segment(3) == identity.segment(3)
    assert len({identity.segment(number).trace_id for number in range(5)}) == 5


def test_a_span_costs_three_python_calls_in_the_step():
    """What the default detail costs in a step, counted, so that it does not depend on the machine."""
    recorder = SpanRecorder(lambda batch: None)
    recorder.end(recorder.begin("step", {"step": 0}))  # the thread's own list is made once
    calls = Counter()

    def count(frame, event, argument):
        if event == "call":
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        step = recorder.begin("step", {"step": 1})
        for _ in range(10):
            recorder.end(recorder.begin("all_gather", {"axis": "dp_shard"}))
        recorder.end(step)
    finally:
        sys.setprofile(None)
    # And two that make a batch of them all and hand it over.
    assert calls == {"begin": 11, "__init__": 11, "end": 11, "<lambda>": 2}
