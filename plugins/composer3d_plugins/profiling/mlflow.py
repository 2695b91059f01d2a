"""Metrics in MLflow."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from composer3d import PluginError, RunContext, hookimpl, plugin

__all__ = ["MLflow"]

_MOST_PENDING = 1024  # rows that wait to be sent; a server that is gone for longer loses the next ones
_LONGEST_WAIT_S = 30.0  # at the run's end, for a server that takes no row meanwhile

_Row = tuple[int, int, dict[str, float]]  # step, milliseconds since 1970, metrics

log = logging.getLogger(__name__)


@plugin(family="profiling", extra="mlflow")
class MLflow:
    """Log every metric of every step to MLflow, with the resolved manifest as an artifact of the run.

    A server that is slow or gone delays no step, the first one included: rows wait, and those of steps that cannot be
    sent are counted and logged. At the end of the run, one that takes no row within 30 s is waited for no longer.

    Memory: at most 1024 steps' rows that wait to be sent.
    Collectives: none; the first rank logs.

    Args:
        tracking_uri: Of the server or store; default: the library's, of `MLFLOW_TRACKING_URI`.
        experiment: The experiment, made if it is not there.
        name: The run's; default: the library makes one.
        tags: Of the run.
    """

    tracking_uri: str | None = Field(default=None, min_length=1)
    experiment: str = Field(default="Default", min_length=1)
    name: str | None = Field(default=None, min_length=1)
    tags: Mapping[str, str] = Field(default_factory=dict)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse a run without the library."""
        if importlib.util.find_spec("mlflow") is None:
            raise PluginError("mlflow is not installed", hint='pip install "composer3d[mlflow]"')

    @hookimpl
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step's row, which a thread sends."""
        if context.rank != 0 or context.purpose != "run":
            return
        if self not in context.state:
            context.state[self] = _Sender(functools.partial(self._start, context))
        context.state[self].log(step, metrics)

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Wait until everything is sent, and log how the run ended."""
        if self in context.state:
            context.state[self].finish("FINISHED" if error is None else "FAILED")

    def _start(self, context: RunContext) -> tuple[Any, str]:
        """Make the run at the server; return the library's client and the run's id."""
        tracking = importlib.import_module("mlflow.tracking")
        client = tracking.MlflowClient(tracking_uri=self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        run = client.create_run(experiment, run_name=self.name, tags=dict(self.tags))
        client.log_param(run.info.run_id, "layout", str(context.layout))
        client.log_text(run.info.run_id, context.manifest.document.to_toml(), "manifest.toml")
        return client, run.info.run_id


class _Sender:
    """Makes a run at the tracking server and sends rows to it, in a thread, so that a slow server delays no step.

    Args:
        start: Makes the run; returns the library's client and the run's id. Called again for the next row if it fails.
    """

    def __init__(self, start: Callable[[], tuple[Any, str]]) -> None:
        self._start, self._num_sent, self._num_lost = start, 0, 0
        self._rows: queue.Queue[_Row | str] = queue.Queue(_MOST_PENDING)  # the text, the run's status, comes last
        self._thread = threading.Thread(target=self._send_all, name="composer3d-mlflow", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step's row; one that finds no place is lost, and counted."""
        try:
            self._rows.put_nowait((step, int(time.time() * 1000), dict(metrics)))
        except queue.Full:
            self._num_lost += 1

    def _send_all(self) -> None:
        entities = importlib.import_module("mlflow.entities")
        started: tuple[Any, str] | None = None
        while not isinstance(row := self._rows.get(), str):
            step, now_ms, metrics = row
            try:
                client, run_id = started = started or self._start()
                found = [entities.Metric(name, float(value), now_ms, step) for name, value in metrics.items()]
                client.log_batch(run_id, metrics=found)
                self._num_sent += 1
            except Exception as error:  # whatever a server or its library raises, training goes on
                if not self._num_lost:
                    log.warning("[profiling.mlflow] a step's metrics could not be sent: %s", error)
                self._num_lost += 1
            self._rows.task_done()
        if started is not None:
            try:
                started[0].set_terminated(started[1], row)
            except Exception as error:
                log.warning("[profiling.mlflow] the end of the run could not be sent: %s", error)

    def finish(self, status: str) -> None:
        """Send what is left and the run's end, as long as the server takes rows, and log how many steps were lost."""
        while self._rows.full():  # nothing else is put there now
            self._rows.get_nowait()
            self._num_lost += 1
        self._rows.put(status)
        sent = -1
        while self._thread.is_alive() and sent < self._num_sent:
            sent = self._num_sent
            self._thread.join(_LONGEST_WAIT_S)
        waiting = self._rows.unfinished_tasks - 1 if self._thread.is_alive() else 0
        if num_lost := self._num_lost + waiting:
            log.warning("[profiling.mlflow] steps whose metrics could not be sent: %d", num_lost)
