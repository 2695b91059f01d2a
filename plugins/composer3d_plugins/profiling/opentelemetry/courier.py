"""Export thread: steps queue batches and never wait; spans that are dropped or refused are counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer3d_plugins.profiling.opentelemetry.span_recorder import Batch

__all__ = ["Counts", "Courier", "Delivery"]

_EXPORT_AT_ONCE = 512
_LIBRARY = "opentelemetry.exporter"


@dataclass(kw_only=True)
class Counts:
    """Numbers of spans by their fate.

    Attributes:
        recorded: Spans that steps recorded.
        overflowed: Of them, those for which the queue had no room.
        unconverted: Of them, those that were still queued when closing had to end.
        made: Spans that were made of the others; fewer, where those of a step are merged.
        delivered: Of those, the ones that the collector took.
        refused: Those that it answered not to have taken, in whole or in part.
        failed: Those that never reached it, or whose answer never came.
    """

    recorded: int = 0
    overflowed: int = 0
    unconverted: int = 0
    made: int = 0
    delivered: int = 0
    refused: int = 0
    failed: int = 0

    @property
    def lost(self) -> int:
        """Spans that are not with the collector."""
        return self.overflowed + self.unconverted + self.made - self.delivered


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Outcome of an export.

    Args:
        ok: It was sent, and answered.
        refused: Spans that the collector did not take, by its answer.
        reason: The collector's message; empty without one.
    """

    ok: bool
    refused: int = 0
    reason: str = ""


@dataclass(kw_only=True)
class Courier:
    """Exports batches in a thread of its own, every `interval_s` seconds.

    Args:
        convert: Makes spans of a batch.
        export: Sends spans.
        finish: Gives the last spans, when closing.
        export_metrics: Sends the present metrics.
        interval_s: Between exports of spans.
        metrics_interval_s: Between exports of metrics, at most: the first pauses are shorter.
        queue_size: Spans that wait at most.
        name: Of this rank, for what is reported.
        release: Releases connections and files, at the end.
        counts: Where every span went.
        secrets: Texts that are hidden in what is reported; a collector may answer with what it was sent.
    """

    convert: Callable[[Batch], Sequence[Any]]
    export: Callable[[Sequence[Any]], Delivery]
    finish: Callable[[], Sequence[Any]]
    export_metrics: Callable[[], None]
    interval_s: float
    metrics_interval_s: float
    queue_size: int
    name: str
    release: Callable[[], None]
    counts: Counts = field(default_factory=Counts)
    secrets: Collection[str] = ()

    def __post_init__(self) -> None:
        """Start the thread."""
        self._queue: deque[Batch] = deque()
        self._queued = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = self._finishing = self._abandoned = False
        self._told = 0
        self._reason = ""
        self._heard = _LastMessage()
        self._thread = threading.Thread(target=self._run, name="composer3d-telemetry", daemon=True)
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Queue a batch, or count it where the queue is full; never waits for the thread's work."""
        size = len(batch.records)
        with self._lock:
            self.counts.recorded += size
            if self._queued + size > self.queue_size:
                self.counts.overflowed += size
                return
            self._queued += size
            self._queue.append(batch)

    def close(self, timeout_s: float) -> None:
        """Export what is left, for at most so many seconds, and report what was lost."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        with self._lock:
            if self._thread.is_alive() and not self._finishing:
                self._abandoned = True
                self.counts.unconverted += 1  # the run's own span, which is made last
            self.counts.unconverted += self._queued
            self._queued = 0
            self._queue.clear()
        self._report(final=True)

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        library = logging.getLogger(_LIBRARY)
        propagates = library.propagate
        # The exporters log every failure; here failures are counted, and told a few times with their reason.
        library.propagate = False
        library.addHandler(self._heard)
        # The first ones come soon and then ever later, so that a short run has a curve too.
        pause = min(self.interval_s, self.metrics_interval_s)
        next_metrics = time.monotonic() + pause
        try:
            while not self._closing:
                self._wake.wait(self.interval_s)
                self._drain()
                if time.monotonic() >= next_metrics and not self._closing:
                    self._safely(self.export_metrics)
                    pause = min(2 * pause, self.metrics_interval_s)
                    next_metrics = time.monotonic() + pause
            self._drain_all()
            with self._lock:
                if self._abandoned:  # what is lost has been told
                    return
                self._finishing = True
            self._send(self.finish())
            self._safely(self.export_metrics)
        finally:
            self._safely(self.release)
            library.removeHandler(self._heard)
            library.propagate = propagates

    def _drain_all(self) -> None:
        """Export the rest; wait for the device where it has not come to the last marks yet."""
        self._drain()
        while self._queued:
            time.sleep(0.01)
            self._drain()

    def _drain(self) -> None:
        spans: list[Any] = []
        while True:
            with self._lock:
                if not self._queue or not all(record.is_ready for record in self._queue[0].records):
                    break
                batch = self._queue.popleft()
                self._queued -= len(batch.records)
            try:
                spans += self.convert(batch)
            except Exception as error:  # a span that cannot be made is a loss, and no reason to stop exporting
                self.counts.unconverted += len(batch.records)
                self._reason = f"{type(error).__name__}: {error}"
            if len(spans) >= _EXPORT_AT_ONCE:
                self._send(spans)
                spans = []
        self._send(spans)

    def _send(self, spans: Sequence[Any]) -> None:
        if not spans:
            return
        self.counts.made += len(spans)
        try:
            delivery = self.export(spans)
        except Exception as error:  # whatever an exporter raises, training goes on
            delivery = Delivery(ok=False, reason=f"{type(error).__name__}: {error}")
        if delivery.ok:
            self.counts.delivered += len(spans) - delivery.refused
            self.counts.refused += delivery.refused
        else:
            self.counts.failed += len(spans)
        if not delivery.ok or delivery.refused:
            self._reason = delivery.reason or self._heard.text
        self._report()

    def _safely(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._reason = f"{type(error).__name__}: {error}"

    def _report(self, *, final: bool = False) -> None:
        """Warn at the first loss, whenever it has grown tenfold, and at the end."""
        counts = self.counts
        lost = counts.overflowed + counts.unconverted + counts.refused + counts.failed
        lost = max(lost, counts.lost) if final else lost
        if lost and (final or lost >= 10 * self._told):
            self._told = lost
            reason = self._reason
            for secret in filter(None, self.secrets):
                reason = reason.replace(secret, "**********")
            logging.getLogger(__name__).warning(
                "telemetry of %s: %d spans are lost (%d found the queue full, %d were refused, %d could not be sent, "
                "%d were left at the end), %d were delivered%s",
                self.name,
                lost,
                counts.overflowed,
                counts.refused,
                counts.failed,
                counts.unconverted + counts.made - counts.delivered - counts.refused - counts.failed,
                counts.delivered,
                f"; {reason}" if reason else "",
            )


class _LastMessage(logging.Handler):
    """Keeps what a library last logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.text = record.getMessage()
