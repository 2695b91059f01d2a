"""Span recorder for the inside of steps: raw times appended to a list, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

__all__ = ["Batch", "DeviceClock", "Event", "Record", "SpanRecorder"]

# They wait for the host, or their times on the device would say nothing: never measured by events.
_ON_HOST = frozenset({"data_wait", "checkpoint"})


class Event(Protocol):
    """A mark in a device's stream, as `torch.Event(enable_timing=True)` is one."""

    def record(self) -> None:
        """Put the mark at the end of the current stream."""

    def query(self) -> bool:
        """Tell, without waiting, whether the device has come to it."""

    def elapsed_time(self, later: Any, /) -> float:
        """Return the milliseconds between two marks that the device has come to."""


class Record:
    """A span before it is one: times of `perf_counter_ns`, and marks in the device's stream where there is one."""

    __slots__ = ("attributes", "begin_event", "end_event", "end_ns", "name", "parent", "start_ns", "thread")

    def __init__(self, name: str, attributes: Mapping[str, Any], parent: Record | None) -> None:
        self.name, self.attributes, self.parent = name, attributes, parent
        self.begin_event: Event | None = None
        self.end_event: Event | None = None
        self.end_ns = 0
        self.thread = 0
        self.start_ns = time.perf_counter_ns()

    @property
    def is_ready(self) -> bool:
        """Whether its times are known: always, or once the device has come to both marks."""
        return (self.begin_event is None or self.begin_event.query()) and (
            self.end_event is None or self.end_event.query()
        )


class Batch(NamedTuple):
    """Spans that ended together.

    Args:
        records: In the order in which they ended.
        num_steps: Steps that had begun by then, the same on all ranks whatever is lost on the way.
    """

    records: list[Record]
    num_steps: int


class SpanRecorder:
    """The recorder of one rank.

    `begin` and `end` append; when a span without a parent ends, or a step does, what has ended is queued as one
    batch. A thread that opens its first span (autograd's, on CUDA) hangs it below the innermost span of the thread that
    runs the steps.

    Args:
        deliver: Takes a batch; must not wait.
        make_event: Makes a mark in the device's stream; None times the host alone.
        only: Names of spans that are recorded; None records all.
        every: Steps from one that is recorded whole to the next; of the others only the step itself is.
    """

    def __init__(
        self,
        deliver: Callable[[Batch], None],
        *,
        make_event: Callable[[], Event] | None = None,
        only: frozenset[str] | None = None,
        every: int = 1,
    ) -> None:
        self._deliver, self._make_event, self._only, self._every = deliver, make_event, only, every
        self._stacks = _Stacks()
        self._main: list[Record] = []
        self._finished: list[Record] = []
        self._num_steps = 0
        self._sparse = False

    def begin(self, name: str, attributes: Mapping[str, Any]) -> Record | None:
        """Open a span."""
        if name == "step":
            self._sparse = self._every > 1 and attributes["step"] % self._every != 0
            self._main = self._stacks.open
            self._num_steps += 1
        elif self._sparse or (self._only is not None and name not in self._only):
            return None
        stack = self._stacks.open
        parent = stack[-1] if stack else (self._main[-1] if self._main else None)
        record = Record(name, attributes, parent)
        if self._make_event is not None and name not in _ON_HOST:
            record.begin_event = self._make_event()
            record.begin_event.record()
        stack.append(record)
        return record

    def end(self, record: Record | None) -> None:
        """Close a span, and queue what has ended where no span is open around it."""
        if record is None:
            return
        if record.begin_event is not None and self._make_event is not None:
            record.end_event = self._make_event()
            record.end_event.record()
        record.end_ns = time.perf_counter_ns()
        record.thread = self._stacks.number
        stack = self._stacks.open
        # An exception may have left spans open that are inside of this one.
        while stack and stack.pop() is not record:
            pass
        self._finished.append(record)
        if record.name == "step":
            self._sparse = False
        if record.parent is None:
            records, self._finished = self._finished, []
            self._deliver(Batch(records, self._num_steps))


class _Stacks(threading.local):
    """The open spans of every thread, and its number in the order in which threads came."""

    def __init__(self) -> None:
        self.open: list[Record] = []
        self.number = threading.get_native_id()


class DeviceClock:
    """Puts marks in a device's stream into the host's time, without ever waiting for the device.

    One mark has a known time; all others are that far from it. The known mark moves along with the steps, because the
    distance comes as a float32 of milliseconds: after hours it would be rounded to milliseconds.

    Args:
        anchor: A mark that the device has come to.
        anchor_ns: The host's time of it, ns of `perf_counter_ns`.
    """

    def __init__(self, anchor: Event, anchor_ns: int) -> None:
        self._anchor, self._anchor_ns = anchor, anchor_ns

    def time_ns(self, event: Event) -> int:
        """Return when the device came to a mark, in the host's `perf_counter_ns`."""
        return self._anchor_ns + round(self._anchor.elapsed_time(event) * 1e6)

    def move_to(self, event: Event) -> None:
        """Take a later mark as the known one."""
        self._anchor_ns, self._anchor = self.time_ns(event), event
