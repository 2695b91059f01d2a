"""Exporters of spans and metrics: OTLP over HTTP or gRPC, the console, files of JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from composer3d_plugins.profiling.opentelemetry.courier import Delivery

__all__ = ["Exporters", "RotatedFile", "make_exporters"]


@dataclass(frozen=True, kw_only=True)
class Exporters:
    """Destinations of this rank's telemetry.

    Args:
        spans: Sends spans, and returns the outcome.
        metrics: Sends the SDK's `MetricsData`.
        close: Releases connections and files.
    """

    spans: Callable[[Sequence[Any]], Delivery]
    metrics: Callable[[Any], None]
    close: Callable[[], None]


def make_exporters(
    kind: Literal["otlp", "console", "file"],
    *,
    protocol: Literal["http", "grpc"],
    endpoint: str | None,
    headers: Mapping[str, str],
    timeout_s: float,
    folder: Path,
    rank: int,
    file_bytes: int,
    keep_files: int,
) -> Exporters:
    """Make the exporters of one rank.

    Args:
        kind: Of exporter.
        protocol: Of `otlp`.
        endpoint: Of `otlp`: the collector's base URL; None is the protocol's port on this machine.
        headers: Of `otlp`.
        timeout_s: Of one export, retries included.
        folder: Of `file`; made if it is not there.
        rank: This one.
        file_bytes: Of `file`: above it a file is put aside and a new one begun.
        keep_files: Of `file`: how many stay, the one that is written to included.
    """
    if kind == "otlp" and protocol == "http":
        return _http(endpoint or "http://127.0.0.1:4318", headers, timeout_s)
    if kind == "otlp":
        return _grpc(endpoint or "http://127.0.0.1:4317", headers, timeout_s)
    if kind == "console":
        return _console()
    return _file(folder, rank, file_bytes, keep_files)


def _http(endpoint: str, headers: Mapping[str, str], timeout_s: float) -> Exporters:
    import requests
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    answers: list[requests.Response] = []
    session = requests.Session()
    session.hooks["response"].append(lambda response, **_: answers.append(response))
    options: dict[str, Any] = {"timeout": timeout_s, "headers": dict(headers)}
    base = endpoint.rstrip("/")
    spans = OTLPSpanExporter(endpoint=f"{base}/v1/traces", session=session, **options)
    metrics = OTLPMetricExporter(endpoint=f"{base}/v1/metrics", **options)

    def send(batch: Sequence[Any]) -> Delivery:
        answers.clear()
        if spans.export(batch) is not SpanExportResult.SUCCESS:
            return Delivery(ok=False)
        answer = answers[-1]
        return _believe(answer.content, answer.headers.get("content-type", ""))

    def close() -> None:
        spans.shutdown()
        metrics.shutdown()

    return Exporters(spans=send, metrics=lambda data: _metrics_taken(metrics.export(data)), close=close)


def _believe(content: bytes, content_type: str) -> Delivery:
    """Read an answer of status 200: it may report refused spans, or be no collector's answer at all."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    if not content:
        return Delivery(ok=True)
    refused, reason = 0, ""
    try:
        if "json" in content_type:
            partial = json.loads(content).get("partialSuccess") or {}
            refused, reason = int(partial.get("rejectedSpans", 0)), str(partial.get("errorMessage", ""))
        else:
            answer = ExportTraceServiceResponse.FromString(content)
            refused, reason = answer.partial_success.rejected_spans, answer.partial_success.error_message
    except Exception:  # protobuf, JSON and what they hold each fail in their own way
        shown = content[:60].decode("ascii", "replace")
        return Delivery(ok=False, reason=f"what answers there is no OTLP collector: {shown!r}")
    return Delivery(ok=True, refused=refused, reason=reason)


def _grpc(endpoint: str, headers: Mapping[str, str], timeout_s: float) -> Exporters:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    options: dict[str, Any] = {"endpoint": endpoint, "timeout": timeout_s, "headers": tuple(headers.items())}
    spans: Any = OTLPSpanExporter(**options)
    metrics = OTLPMetricExporter(**options)
    answers: list[Any] = []
    stub = spans._stub

    class Listening:
        """The service's client; the exporter throws its answers away, and has no public place to hear them."""

        def __init__(self, channel: Any) -> None:
            self._client = stub(channel)

        def Export(self, **request: Any) -> Any:  # noqa: N802 - the service's name for it
            answers.append(self._client.Export(**request))
            return answers[-1]

    spans._stub = Listening
    spans._initialize_channel_and_stub()

    def send(batch: Sequence[Any]) -> Delivery:
        answers.clear()
        if spans.export(batch) is not SpanExportResult.SUCCESS:
            return Delivery(ok=False)
        partial = answers[-1].partial_success
        return Delivery(ok=True, refused=partial.rejected_spans, reason=partial.error_message)

    def close() -> None:
        spans.shutdown()
        metrics.shutdown()

    return Exporters(spans=send, metrics=lambda data: _metrics_taken(metrics.export(data)), close=close)


def _metrics_taken(result: Any) -> None:
    if result.name != "SUCCESS":
        raise ConnectionError("metrics could not be sent")


def _console() -> Exporters:
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    spans = ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n")
    metrics = ConsoleMetricExporter(out=sys.stderr, formatter=lambda data: data.to_json(indent=None) + "\n")

    def send(batch: Sequence[Any]) -> Delivery:
        spans.export(batch)
        return Delivery(ok=True)

    def send_metrics(data: Any) -> None:
        metrics.export(data)

    return Exporters(spans=send, metrics=send_metrics, close=lambda: None)


class RotatedFile:
    """Lines in a file that is put aside as `NAME.1` when it is full, the ones before as `NAME.2` and so on.

    Args:
        path: The file.
        max_bytes: Its size, which one line alone may exceed.
        num_kept: Files that stay, this one included; the oldest one goes.
    """

    def __init__(self, path: Path, *, max_bytes: int, num_kept: int) -> None:
        self._path, self._max_bytes, self._num_kept = path, max_bytes, num_kept
        self._file = path.open("ab")

    def write(self, text: str) -> None:
        """Append a line in one write: a kill truncates the last line at most."""
        line = text.encode() + b"\n"
        if self._file.tell() and self._file.tell() + len(line) > self._max_bytes:
            self._rotate()
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._num_kept - 1, 0, -1):
            before = self._aside(number - 1) if number > 1 else self._path
            if before.exists():
                before.replace(self._aside(number))
        self._file = self._path.open("wb" if self._num_kept == 1 else "ab")

    def _aside(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _file(folder: Path, rank: int, file_bytes: int, keep_files: int) -> Exporters:
    """Write OTLP's JSON encoding, a line an export, which collectors read as files too."""
    folder.mkdir(parents=True, exist_ok=True)
    spans = RotatedFile(folder / f"rank-{rank}.jsonl", max_bytes=file_bytes, num_kept=keep_files)
    metrics = RotatedFile(folder / f"rank-{rank}.metrics.jsonl", max_bytes=file_bytes, num_kept=keep_files)

    def send(batch: Sequence[Any]) -> Delivery:
        spans.write(json.dumps(_lines(batch), separators=(",", ":")))
        return Delivery(ok=True)

    def send_metrics(data: Any) -> None:
        metrics.write(data.to_json(indent=None))

    def close() -> None:
        spans.close()
        metrics.close()

    return Exporters(spans=send, metrics=send_metrics, close=close)


def _lines(batch: Sequence[Any]) -> dict[str, Any]:
    first = batch[0]
    scope = {"name": first.instrumentation_scope.name}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(first.resource.attributes)},
                "scopeSpans": [{"scope": scope, "spans": [_span(span) for span in batch]}],
            }
        ]
    }


def _span(span: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        "parentSpanId": "" if span.parent is None else f"{span.parent.span_id:016x}",
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
    }
    if span.links:
        result["links"] = [
            {"traceId": f"{link.context.trace_id:032x}", "spanId": f"{link.context.span_id:016x}"}
            for link in span.links
        ]
    if not span.status.is_unset:
        result["status"] = {"code": span.status.status_code.value, "message": span.status.description or ""}
    return result


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
