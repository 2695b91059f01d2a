"""OpenTelemetry: traces and metrics of a run."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from composer3d import PluginError, Recorder, RunContext, Secret, broadcast_json, hookimpl, plugin
from composer3d_plugins.profiling.opentelemetry.block_spans import watch_blocks
from composer3d_plugins.profiling.opentelemetry.courier import Counts, Courier
from composer3d_plugins.profiling.opentelemetry.endpoints import refusal_of
from composer3d_plugins.profiling.opentelemetry.exporters import make_exporters
from composer3d_plugins.profiling.opentelemetry.metric_instruments import Figures
from composer3d_plugins.profiling.opentelemetry.span_recorder import DeviceClock, SpanRecorder
from composer3d_plugins.profiling.opentelemetry.traces import Identity, Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

__all__ = ["OpenTelemetry"]

_STEPS_ONLY = frozenset({"step", "data_wait", "checkpoint", "evaluate"})
_MODULES = {"http": "opentelemetry.exporter.otlp.proto.http", "grpc": "opentelemetry.exporter.otlp.proto.grpc"}


@plugin(family="profiling", extra="otlp", provides={"traces": {"exporter": "file", "detail": "layer"}})
class OpenTelemetry:
    """Trace every step on every rank, in one trace, and export the run's metrics.

    Steps only note raw times; a thread makes spans of them, exports them, and counts what is not taken. The span `run`
    hangs below the launcher's, if there is a `TRACEPARENT`; below it are steps, data waits, checkpoints and
    evaluations; in a step forward, backward, optimizer, every group of collectives, those inside operators too, and the
    messages of a pipeline.

    Memory: what `queue_size` spans take, below 10 MiB.
    Collectives: one broadcast of the trace's name at the start, none in steps.

    Args:
        exporter: `file` writes OTLP's JSON lines into the run's folder, a file a rank; `otlp` sends to a collector;
            `console` writes to standard error.
        protocol: Of `otlp`.
        endpoint: Of `otlp`: the collector's base URL; default: this machine, port 4318 (http) or 4317 (grpc).
        headers: Of `otlp`, sent with every export; secrets, which are neither shown nor written: a value is a string,
            `{ env = "NAME" }` or `{ file = "PATH" }`.
        folder: Of `file`; default: `traces` in the run's folder.
        file_mib: Of `file`: a file above it is put aside as `rank-R.jsonl.1`, and a new one begun.
        keep_files: Of `file`: how many files of a rank stay, of spans and of metrics each; the oldest spans go.
        detail: `step` steps alone; `phase` forward, backward and so on, each once a step; `microbatch` every action of
            every micro-batch, and every collective; `layer` every block's forward and backward as well.
        every: Steps from one that is traced in detail to the next.
        rotate_steps: Steps after which a new trace begins, linked to the first: viewers do not take endless ones. It
            begins no new file.
        interval_s: Seconds between exports of spans.
        metrics_interval_s: Seconds between exports of metrics, once a run lasts; the first come sooner.
        queue_size: Spans that wait for export at most; more are dropped, counted and logged.
        timeout_s: Seconds that an export may take, and that closing waits for the last one.
    """

    exporter: Literal["file", "otlp", "console"] = "file"
    protocol: Literal["http", "grpc"] = "http"
    endpoint: str | None = None
    headers: dict[str, Secret] = Field(default_factory=dict)
    folder: str | None = None
    file_mib: float = Field(default=32.0, gt=0)
    keep_files: int = Field(default=4, ge=1, examples=[])  # of files that are closed: no step differs
    detail: Literal["step", "phase", "microbatch", "layer"] = "phase"
    every: int = Field(default=1, ge=1)
    rotate_steps: int = Field(default=1000, ge=1)
    interval_s: float = Field(default=0.5, gt=0, le=86400, examples=[])
    metrics_interval_s: float = Field(default=10.0, gt=0, le=86400, examples=[])
    queue_size: int = Field(default=16384, ge=1, le=1 << 24, examples=[1])
    timeout_s: float = Field(default=5.0, gt=0, le=86400, examples=[])

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse options of another exporter, one that is not installed, and a collector that has no address."""
        if self.exporter != "otlp":
            for name, value in (("endpoint", self.endpoint), ("headers", self.headers)):
                if value:
                    raise PluginError(
                        f'{name} has no effect with exporter = "{self.exporter}"', hint='write exporter = "otlp"'
                    )
        if self.endpoint is not None and (reason := refusal_of(self.endpoint, self.protocol)) is not None:
            raise PluginError(reason)
        if self.exporter != "file":
            defaults = {"folder": None, "file_mib": 32.0, "keep_files": 4}
            for name in (name for name, default in defaults.items() if getattr(self, name) != default):
                raise PluginError(
                    f'{name} has no effect with exporter = "{self.exporter}"', hint='write exporter = "file"'
                )
        if self.exporter == "otlp" and not _is_installed(_MODULES[self.protocol]):
            raise PluginError(
                f"the OTLP exporter for {self.protocol} is not installed", hint='pip install "composer3d[otlp]"'
            )
        if context.purpose == "run":
            self._reveal_headers(context)

    def _reveal_headers(self, context: RunContext) -> dict[str, str]:
        return {name: value.reveal(context.manifest.document.folder) for name, value in self.headers.items()}

    @hookimpl
    def composer3d_recorder(self, context: RunContext) -> Recorder | None:
        """Agree on the trace and start the exporting thread; Collectives: one broadcast."""
        if context.purpose != "run":
            return None
        session = _start(self, context)
        context.state[self] = session
        if self.detail == "layer":
            watch_blocks(context, session.recorder)
        return session.recorder

    @hookimpl
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the row for the next export."""
        session = context.state.get(self)
        if session is not None:
            session.figures.step(metrics)

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Export what is left within `timeout_s`, and report what was lost."""
        session = context.state.get(self)
        if session is not None:
            session.error.append(None if error is None else f"{type(error).__name__}: {error}")
            session.courier.close(self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class Session:
    """Running exporters and recorders.

    Args:
        recorder: Of the steps.
        courier: The thread.
        figures: The instruments.
        counts: Of spans.
        identity: Of the trace.
        error: What ended the run, once it has ended.
    """

    recorder: SpanRecorder
    courier: Courier
    figures: Figures
    counts: Counts
    identity: Identity
    error: list[str | None]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _start(options: OpenTelemetry, context: RunContext) -> Session:
    import torch

    identity = _agree(context)
    resource = _resource(context, identity)
    headers = options._reveal_headers(context)
    exporters = make_exporters(
        options.exporter,
        protocol=options.protocol,
        endpoint=options.endpoint,
        headers=headers,
        timeout_s=options.timeout_s,
        folder=context.output / "traces" if options.folder is None else Path(options.folder),
        rank=context.rank,
        file_bytes=int(options.file_mib * 2**20),
        keep_files=options.keep_files,
    )
    clock: DeviceClock | None = None
    if context.device.type == "cuda":
        anchor = _device_event()
        anchor.record()
        torch.cuda.synchronize(context.device)  # once, before the first step
        clock = DeviceClock(anchor, time.perf_counter_ns())
    tracing = Tracing(
        identity,
        is_first=context.rank == 0,
        resource=resource,
        merged=options.detail in ("step", "phase"),
        rotate_steps=options.rotate_steps,
        attributes={"world_size": context.world_size, "layout": str(context.layout)},
        clock=clock,
    )
    counts, error = Counts(), list[str | None]()
    figures = Figures(resource, is_first=context.rank == 0, device=context.device, counts=counts)
    courier = Courier(
        convert=tracing.convert,
        export=exporters.spans,
        finish=lambda: tracing.close(error[-1] if error else None),
        export_metrics=lambda: exporters.metrics(figures.collect()),
        interval_s=options.interval_s,
        metrics_interval_s=options.metrics_interval_s,
        queue_size=options.queue_size,
        name=f"rank {context.rank}",
        counts=counts,
        release=exporters.close,
        secrets=[*headers.values(), *_password_of(options.endpoint)],
    )
    recorder = SpanRecorder(
        courier.put,
        make_event=None if clock is None else _device_event,
        only=_STEPS_ONLY if options.detail == "step" else None,
        every=options.every,
    )
    return Session(recorder=recorder, courier=courier, figures=figures, counts=counts, identity=identity, error=error)


def _agree(context: RunContext) -> Identity:
    """Let the first rank name the trace."""
    return Identity(**broadcast_json(asdict(Identity.make(os.environ.get("TRACEPARENT")))))


def _resource(context: RunContext, identity: Identity) -> Resource:
    from opentelemetry.sdk.resources import Resource

    mesh = {f"composer3d.mesh.{axis}": index for axis, index in context.coordinates.items()}
    return Resource(
        {
            "service.name": "composer3d",
            "service.instance.id": f"{identity.span_id:016x}/rank{context.rank}",
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            "telemetry.sdk.name": "opentelemetry",
            "telemetry.sdk.language": "python",
            "composer3d.rank": context.rank,
            "composer3d.world_size": context.world_size,
            "composer3d.manifest.file": context.manifest.document.file,
            "composer3d.manifest.sha256": context.manifest.document.digest(),
            **mesh,
        }
    )


def _password_of(endpoint: str | None) -> list[str]:
    password = urlsplit(endpoint or "").password
    return [password] if password else []


def _device_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)
