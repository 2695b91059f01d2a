"""Metrics in MLflow."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from composer3d import PluginError, RunContext, hookimpl, plugin

__all__ = ["MLflow"]

_MOST_PENDING = 1024  # rows that wait to be sent; a server that is gone for longer loses the next ones

log = logging.getLogger(__name__)


@plugin(family="profiling", extra="mlflow")
class MLflow:
    """Log every metric of every step to MLflow, with the resolved manifest as an artifact of the run.

    A server that is slow or gone delays no step: rows wait, and those of steps that cannot be sent are counted and
    logged.

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
            context.state[self] = self._start(context)
        context.state[self].log(step, metrics)

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Wait until everything is sent, and log how the run ended."""
        if self in context.state:
            context.state[self].finish("FINISHED" if error is None else "FAILED")

    def _start(self, context: RunContext) -> _Sender:
        tracking = importlib.import_module("mlflow.tracking")
        client = tracking.MlflowClient(tracking_uri=self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        run = client.create_run(experiment, run_name=self.name, tags=dict(self.tags))
        client.log_param(run.info.run_id, "layout", str(context.layout))
        client.log_text(run.info.run_id, context.manifest.document.to_toml(), "manifest.toml")
        return _Sender(client, run.info.run_id)


class _Sender:
    """Sends rows to a run of the tracking server in a thread of its own, so that a slow server delays no step.

    Args:
        client: Of the library.
        run_id: The run's.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id, self._num_lost = client, run_id, 0
        self._rows: queue.Queue[list[Any] | None] = queue.Queue(_MOST_PENDING)
        self._thread = threading.Thread(target=self._send_all, name="composer3d-mlflow", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step's row; one that finds no place is lost, and counted."""
        entities = importlib.import_module("mlflow.entities")
        now_ms = int(time.time() * 1000)
        try:
            self._rows.put_nowait(
                [entities.Metric(name, float(value), now_ms, step) for name, value in metrics.items()]
            )
        except queue.Full:
            self._num_lost += 1

    def _send_all(self) -> None:
        while (rows := self._rows.get()) is not None:
            try:
                self._client.log_batch(self._run_id, metrics=rows)
            except Exception as error:  # whatever a server or its library raises, training goes on
                if not self._num_lost:
                    log.warning("[profiling.mlflow] a step's metrics could not be sent: %s", error)
                self._num_lost += 1

    def finish(self, status: str) -> None:
        """Send what is left, end the run, and log how many steps were lost."""
        self._rows.put(None)
        self._thread.join()
        if self._num_lost:
            log.warning("[profiling.mlflow] steps whose metrics could not be sent: %d", self._num_lost)
        try:
            self._client.set_terminated(self._run_id, status)
        except Exception as error:
            log.warning("[profiling.mlflow] the end of the run could not be sent: %s", error)
