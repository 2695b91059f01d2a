"""Prometheus: metrics to be scraped."""

from __future__ import annotations

import importlib.util
import ipaddress
import math
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from composer3d import Metric, PluginError, Recorder, RunContext, hookimpl, plugin

__all__ = ["Prometheus"]

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_COMPUTING = frozenset({"forward", "backward", "backward_input", "backward_weight"})


@plugin(family="profiling", extra="prometheus")
class Prometheus:
    """Serve the metrics of the last step on every node, for Prometheus to scrape.

    The first rank of a node serves. Metrics are those of the run, reduced over ranks, and three of this plugin: the
    longest time that a rank spent in forward and backward of a step and their mean, whose ratio shows a straggler, and
    when the last step ended. `python -m composer3d_plugins.profiling.prometheus dashboard` prints a Grafana dashboard,
    `rules` in place of `dashboard` alert rules: a stalled step, a loss that is not finite, a straggler, memory.

    Memory: below 1 MiB.
    Collectives: none of its own; its metrics travel with all others.

    Args:
        port: On which the node's first rank listens; 0 takes a free one, which the log names.
        address: On which it listens: `127.0.0.1` is reached from this machine alone, `0.0.0.0` from everywhere; nothing
            asks for a password.
    """

    port: int = Field(default=9464, ge=0, le=65535)
    address: str = "127.0.0.1"

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        """Refuse what no socket can listen on; whether a name has an address, the machine of the run decides."""
        try:
            ipaddress.ip_address(address)
        except ValueError:
            if len(address) > 253 or not _HOST.fullmatch(address) or address.replace(".", "").isdigit():
                raise ValueError(f'"{address[:80]}" is neither an IP address nor the name of a host') from None
        return address

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse a run without the library."""
        if importlib.util.find_spec("prometheus_client") is None:
            raise PluginError("prometheus_client is not installed", hint='pip install "composer3d[prometheus]"')

    @hookimpl
    def composer3d_recorder(self, context: RunContext) -> Recorder | None:
        """Start serving, and time forwards and backwards."""
        if context.purpose != "run":
            return None
        node = context.state[self] = _Node(self, context)
        return node

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> list[Metric]:
        """Give the time of this rank's forwards and backwards, and its memory."""
        node = context.state.get(self)
        return [] if node is None else node.measure()

    @hookimpl
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's row."""
        if self in context.state:
            context.state[self].show(step, metrics)

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Stop serving."""
        if self in context.state:
            context.state[self].close()


class _Node:
    """The gauges of a node, and a recorder that adds up computing time."""

    def __init__(self, options: Prometheus, context: RunContext) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._context = context
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._computing_ns = self._inside = 0
        self._server: Any = None
        self.port: int | None = None
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            try:
                self._server, self._thread = start_http_server(
                    options.port, addr=options.address, registry=self._registry
                )
            except OSError as error:
                raise PluginError(
                    f"port {options.port} cannot be served: {error.strerror}",
                    hint="name another one as port, or 0 for any that is free",
                ) from error
            self.port = self._server.server_port

    def begin(self, name: str, attributes: Mapping[str, Any]) -> Any:
        if name == "step":
            self._computing_ns = 0
        elif name in _COMPUTING:
            self._inside += 1
        elif not (self._inside and "axis" in attributes):
            return None
        return name, time.perf_counter_ns()

    def end(self, token: Any) -> None:
        if token is None or token[0] == "step":
            return
        name, started = token
        elapsed = time.perf_counter_ns() - started
        if name in _COMPUTING:
            self._inside -= 1
            self._computing_ns += elapsed
        else:
            # In a collective every rank waits for the slowest one: that is no time of its own.
            self._computing_ns -= elapsed

    def measure(self) -> list[Metric]:
        import torch

        seconds = self._computing_ns / 1e9
        metrics = [
            Metric(name="computing_max_s", value=seconds, reduction="max"),
            Metric(name="computing_mean_s", value=seconds, reduction="mean"),
        ]
        if self._context.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._context.device)
            metrics.append(Metric(name="memory_used_ratio", value=1 - free / total, reduction="max"))
        else:
            pages = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
            metrics.append(Metric(name="memory_used_ratio", value=1 - pages[1] / pages[0], reduction="max"))
        return metrics

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._server is None:
            return
        for name, value in {**metrics, "step": step, "last_step_timestamp_seconds": time.time()}.items():
            if isinstance(value, int | float):
                self._set(name, value)
        self._set("loss_is_finite", float(math.isfinite(metrics.get("loss", 0.0))))

    def _set(self, name: str, value: float) -> None:
        from prometheus_client import Gauge

        if name not in self._gauges:
            told = f"composer3d's {name}, reduced over ranks"
            self._gauges[name] = Gauge(f"composer3d_{name}", told, registry=self._registry)
        self._gauges[name].set(value)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5)
