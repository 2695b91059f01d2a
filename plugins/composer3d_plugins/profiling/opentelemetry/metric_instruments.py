"""Metrics of a run through the SDK: those reduced over ranks, and those of each rank."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d_plugins.profiling.opentelemetry.courier import Counts

if TYPE_CHECKING:
    import torch
    from opentelemetry.sdk.resources import Resource

__all__ = ["Figures", "resident_bytes"]

_UNITS = {
    "step_time_s": "s",
    "data_wait_s": "s",
    "tokens_per_s": "{token}/s",
    "samples_per_s": "{sample}/s",
    "mfu": "1",
    "loss": "1",
}
_COUNTED = {"tokens": "{token}", "samples": "{sample}"}
_TRAINED = {"tokens": "valid tokens trained on", "samples": "samples trained on"}


class Figures:
    """The instruments of one rank.

    A step only leaves its row here; instruments are set when they are exported. What is the same on all ranks is
    exported by the first: `composer3d.loss`, `.tokens_per_s`, `.grad_norm`, `.mfu` and whatever else is in the row as
    gauges, `composer3d.tokens` (or `.samples`) and `composer3d.steps` as counters. Every rank exports its memory and
    its lost spans.

    Args:
        resource: Of this rank.
        is_first: Whether it exports the rows.
        device: For its memory.
        counts: Of spans.
    """

    def __init__(self, resource: Resource, *, is_first: bool, device: torch.device, counts: Counts) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        self._reader = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[self._reader], resource=resource, shutdown_on_exit=False)
        self._meter = provider.get_meter("composer3d")
        self._is_first, self._device, self._counts = is_first, device, counts
        self._gauges: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}
        self._steps = self._meter.create_counter("composer3d.steps", "{step}", "optimizer steps")
        self._lock = threading.Lock()
        self._row: Mapping[str, float] = {}
        self._new_units = dict.fromkeys(_COUNTED, 0.0)
        self._new_steps = 0

    def step(self, row: Mapping[str, float]) -> None:
        """Take a step's row."""
        with self._lock:
            self._row = row
            for name in _COUNTED.keys() & row.keys():
                self._new_units[name] += row[name]
            self._new_steps += 1

    def collect(self) -> Any:
        """Return the SDK's `MetricsData` of this moment."""
        with self._lock:
            row, units, steps = self._row, self._new_units, self._new_steps
            self._new_units, self._new_steps = dict.fromkeys(_COUNTED, 0.0), 0
        if self._is_first:
            for name in sorted(_COUNTED.keys() & row.keys()):
                self._add(name, round(units[name]))
            self._steps.add(steps)
            for name, value in row.items():
                if name not in (*_COUNTED, "step") and isinstance(value, int | float) and math.isfinite(value):
                    self._set(name, value, _UNITS.get(name, ""))
        for name, value in self._memory().items():
            self._set(name, value, "By")
        self._set("spans.lost", self._counts.lost, "{span}")
        return self._reader.get_metrics_data()

    def _add(self, name: str, value: int) -> None:
        if name not in self._counters:
            self._counters[name] = self._meter.create_counter(f"composer3d.{name}", _COUNTED[name], _TRAINED[name])
        self._counters[name].add(value)

    def _set(self, name: str, value: float, unit: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(f"composer3d.{name}", unit)
        self._gauges[name].set(value)

    def _memory(self) -> dict[str, int]:
        import torch

        result = {"memory.resident": resident_bytes()}
        if self._device.type == "cuda":
            result["memory.device.allocated"] = torch.cuda.memory_allocated(self._device)
            result["memory.device.peak"] = torch.cuda.max_memory_allocated(self._device)
        return result


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
