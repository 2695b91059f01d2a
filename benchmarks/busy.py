"""A plugin for `hook_overhead.py` that implements every hook which is called in a step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from composer3d import Metric, RunContext, StepAction, StepPoint, StepState, hookimpl, plugin

__all__ = ["Busy", "Spans"]


class Spans:
    """The least a recorder can do."""

    def begin(self, name: str, attributes: Mapping[str, Any]) -> int:
        return time.perf_counter_ns()

    def end(self, token: int) -> None:
        time.perf_counter_ns()


@plugin(family="profiling")
class Busy:
    """Implement every hook that is called in a step, doing next to nothing. Memory: none. Collectives: none.

    Args:
        number: Which of the five.
    """

    number: int = 0

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> Sequence[StepAction]:
        return [StepAction(name=f"busy{self.number}.{point.name}", point=point, run=self._act) for point in StepPoint]

    @hookimpl
    def composer3d_recorder(self, context: RunContext) -> Spans:
        return Spans()

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> Sequence[Metric]:
        return [Metric(name=f"busy{self.number}", value=float(step))]

    @hookimpl
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        float(metrics["loss"])

    def _act(self, state: StepState) -> None:
        state.metrics["busy"] = 1.0
