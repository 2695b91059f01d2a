"""Spans of the OpenTelemetry SDK, made of records: times, parents, one trace for all ranks, and its rotation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from composer3d_plugins.profiling.opentelemetry.span_recorder import Batch, DeviceClock, Record

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.trace import Link, SpanContext

__all__ = ["Identity", "Tracing", "merge"]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of a run's trace, the same on every rank.

    Args:
        trace_id: 128 bits.
        span_id: Of the span `run`, below which all ranks put their steps.
        parent_id: Of the launcher's span, None without a launcher that has one.
    """

    trace_id: int
    span_id: int
    parent_id: int | None

    @classmethod
    def make(cls, traceparent: str | None) -> Identity:
        """Make a new one, in the launcher's trace if it has one.

        Args:
            traceparent: The launcher's `TRACEPARENT` (W3C Trace Context); one that is not valid is none.
        """
        from opentelemetry.trace import get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": traceparent or ""}
        parent = get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
        if parent.is_valid:
            return cls(trace_id=parent.trace_id, span_id=_random(64), parent_id=parent.span_id)
        return cls(trace_id=_random(128), span_id=_random(64), parent_id=None)

    def segment(self, number: int) -> Identity:
        """Return the trace of a long run's further part; every rank derives the same one."""
        if number == 0:
            return self
        digest = blake2b(f"{self.trace_id:032x}{self.span_id:016x}{number}".encode(), digest_size=24).digest()
        return Identity(trace_id=int.from_bytes(digest[:16]), span_id=int.from_bytes(digest[16:]) or 1, parent_id=None)

    def context(self, span_id: int | None = None) -> SpanContext:
        """Return the context of `run`, or of another span of this trace."""
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(self.trace_id, span_id or self.span_id, is_remote=True, trace_flags=TraceFlags(1))


def _random(bits: int) -> int:
    return secrets.randbits(bits) or 1


@dataclass
class _Merged:
    """Records of one step that have one name and one parent."""

    first: Record
    parent: _Merged | None
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    count: int = 1
    busy_ns: int = field(default=0)


class Tracing:
    """Makes SDK spans of batches, in the thread that exports them.

    Args:
        identity: Of the run.
        is_first: Whether this rank has the span `run`.
        resource: Of this rank.
        merged: Bring the spans of a step that differ only in their micro-batch together into one.
        rotate_steps: Steps after which a new trace begins, linked to the first.
        attributes: Of the span `run`.
        clock: For records with marks of a device.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        is_first: bool,
        resource: Resource,
        merged: bool,
        rotate_steps: int,
        attributes: Mapping[str, Any],
        clock: DeviceClock | None = None,
    ) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self._identity, self._is_first, self._merged = identity, is_first, merged
        self._rotate_steps, self._attributes, self._clock = rotate_steps, dict(attributes), clock
        self._ids, self._ended = _ids(), _collector()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(self._ended)
        self._tracer = self._provider.get_tracer("composer3d")
        self._wall_ns = time.time_ns() - time.perf_counter_ns()
        self._number = 0
        self._run: Span | None = self._begin_run(time.time_ns())

    def convert(self, batch: Batch) -> list[ReadableSpan]:
        """Return the SDK spans of a batch, parents first."""
        number = max(0, batch.num_steps - 1) // self._rotate_steps
        if number != self._number:
            self._rotate(number, self._wall_ns + min(record.start_ns for record in batch.records))
        for merged in merge(batch.records, self._clock, together=self._merged):
            self._emit(merged)
        if self._clock is not None and batch.records[-1].end_event is not None:
            self._clock.move_to(batch.records[-1].end_event)
        self._contexts: dict[int, Any] = {}
        return self._ended.take()

    def close(self, error: str | None) -> list[ReadableSpan]:
        """End the run's span, and return it on the rank that has it."""
        from opentelemetry.trace import StatusCode

        if self._run is not None:
            if error is not None:
                self._run.set_status(StatusCode.ERROR, error)
            self._run.end(time.time_ns())
        return self._ended.take()

    def _emit(self, merged: _Merged) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = self._contexts.get(id(merged.parent)) if merged.parent is not None else None
        span: Any = self._tracer.start_span(
            merged.first.name,
            context=parent or self._below_run,
            attributes=merged.attributes,
            start_time=self._wall_ns + merged.start_ns,
        )
        self._contexts[id(merged)] = set_span_in_context(span)
        span.end(self._wall_ns + merged.end_ns)

    def _rotate(self, number: int, now_ns: int) -> None:
        if self._run is not None:
            self._run.end(now_ns)
        self._number = number
        self._run = self._begin_run(now_ns)

    def _begin_run(self, now_ns: int) -> Span | None:
        """Open the span `run` of the present segment on the first rank; others only know its context."""
        from opentelemetry.trace import Link, NonRecordingSpan, set_span_in_context

        identity = self._identity.segment(self._number)
        self._contexts = {}
        self._below_run = set_span_in_context(NonRecordingSpan(identity.context()))
        if not self._is_first:
            return None
        links: list[Link] = [] if self._number == 0 else [Link(self._identity.context())]
        above = None if identity.parent_id is None else NonRecordingSpan(identity.context(identity.parent_id))
        self._ids.trace_id, self._ids.span_id = identity.trace_id, identity.span_id
        span: Any = self._tracer.start_span(
            "run",
            context=None if above is None else set_span_in_context(above),
            attributes={**self._attributes, "segment": self._number},
            links=links,
            start_time=now_ns,
        )
        return span


def merge(records: Sequence[Record], clock: DeviceClock | None, *, together: bool) -> list[_Merged]:
    """Return what becomes spans, parents first, with times in ns of `perf_counter_ns`.

    Merged spans last from the first's start to the last's end; `count` is their number, `busy_ns` how long they
    were in all, `bytes` what they moved in all.

    Args:
        records: Of one batch.
        clock: For marks of a device.
        together: Merge records of one name, one parent, one collective group and the plugin that issued it.
    """
    found: dict[Any, _Merged] = {}
    of_record: dict[int, _Merged] = {}
    for record in sorted(records, key=lambda record: (record.start_ns, -record.end_ns)):
        start_ns, end_ns = record.start_ns, record.end_ns
        if clock is not None and record.begin_event is not None and record.end_event is not None:
            start_ns, end_ns = clock.time_ns(record.begin_event), clock.time_ns(record.end_event)
        parent = of_record.get(id(record.parent))
        own = record.attributes
        who = (own.get("group"), own.get("axis"), own.get("plugin"))
        key = (id(parent), record.name, *who) if together else id(record)
        merged = found.get(key)
        if merged is None:
            merged = _Merged(record, parent, start_ns, end_ns, dict(own), busy_ns=end_ns - start_ns)
            found[key] = merged
        else:
            merged.start_ns, merged.end_ns = min(merged.start_ns, start_ns), max(merged.end_ns, end_ns)
            merged.count += 1
            merged.busy_ns += end_ns - start_ns
            _combine(merged.attributes, own)
        of_record[id(record)] = merged
    for merged in found.values():
        if merged.count > 1:
            merged.attributes |= {"count": merged.count, "busy_ns": merged.busy_ns}
        if merged.first.begin_event is not None:
            merged.attributes["clock"] = "device"
    return list(found.values())


def _combine(attributes: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add up bytes; keep what is the same, drop what differs."""
    for key in [key for key in attributes if key not in more or attributes[key] != more[key] or key == "bytes"]:
        if key == "bytes" and "bytes" in more:
            attributes["bytes"] += more["bytes"]
        else:
            del attributes[key]


def _ids() -> Any:
    """Return an id generator whose next ids can be set: those of `run`, on which all ranks have agreed."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Ids(IdGenerator):
        trace_id: int | None = None
        span_id: int | None = None

        def generate_trace_id(self) -> int:
            told, self.trace_id = self.trace_id, None
            return told or _random(128)

        def generate_span_id(self) -> int:
            told, self.span_id = self.span_id, None
            return told or _random(64)

    return Ids()


def _collector() -> Any:
    """Return a span processor that keeps what has ended until it is taken."""
    from opentelemetry.sdk.trace import SpanProcessor

    class Collector(SpanProcessor):
        def __init__(self) -> None:
            self._spans: list[ReadableSpan] = []

        def on_end(self, span: ReadableSpan) -> None:
            self._spans.append(span)

        def take(self) -> list[ReadableSpan]:
            taken, self._spans = self._spans, []
            return taken

    return Collector()
