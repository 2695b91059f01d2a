"""Stragglers: ranks whose own work takes longer than the others', step after step."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pydantic import Field

from composer3d import RankNumbers, Recorder, Role, RunContext, StepAction, StepPoint, StepState, hookimpl, plugin

__all__ = ["Stragglers"]

_NAME = "stragglers"
_NOBODY = -1.0

log = logging.getLogger(__name__)


@plugin(family="profiling", provides={"findings": {}})
class Stragglers:
    """Name a rank that is slow for several steps in a row, while the run goes on.

    A rank's own time is that of its step and of waiting for its data, less the time in collectives, where it waits for
    others. It is compared with the median of the ranks of the same stage; ranks of different stages do different work.
    Each step's row has `slow_rank` (-1: none) and `slowest_ratio`; the rank logs a warning when it becomes slow, and
    leaves a line in the run's folder, by which `composer3d doctor` names the node to drain. Prometheus' alert rules
    have one for `slow_rank`.

    Times are the host's: of a GPU, what its kernels take is seen where the host waits for them outside of collectives.

    Memory: none.
    Collectives: none of its own; one integer a rank more on the all-reduce that begins a step.

    Args:
        ratio: How many times the others' median a rank must take to be slow.
        steps: In how many steps in a row.
        least_s: Seconds a step by which it must be slower: a difference of a few is noise in short steps.
    """

    ratio: float = Field(default=1.3, gt=1, examples=[])
    steps: int = Field(default=5, ge=1, examples=[])
    least_s: float = Field(default=0.002, ge=0, examples=[])

    @hookimpl
    def composer3d_recorder(self, context: RunContext) -> Recorder | None:
        """Time this rank's own work."""
        if context.purpose != "run" or context.world_size == 1:
            return None
        numbers = context.stash(RankNumbers)
        numbers.add(_NAME)
        watch = context.state[self] = _Watch(self, context, numbers)
        return watch

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction:
        """Compare the times of the step before, which came with this step's counts."""
        return StepAction(name="stragglers", point=StepPoint.END, run=self._compare)

    def _compare(self, state: StepState) -> None:
        watch: _Watch | None = state.context.state.get(self)
        if watch is not None:
            watch.compare(state)


@dataclass
class _Row:
    """Steps in a row in which ranks were slow."""

    slow: dict[int, int] = field(default_factory=dict)

    def count(self, slow: Sequence[int]) -> None:
        self.slow = {rank: self.slow.get(rank, 0) + 1 for rank in slow}


class _Watch:
    """The own time of this rank's steps, and the comparison with the others'."""

    def __init__(self, options: Stragglers, context: RunContext, numbers: RankNumbers) -> None:
        self._options, self._context, self._numbers = options, context, numbers
        self._begin_ns = self._away_ns = self._data_ns = 0
        self._inside = 0
        self._row = _Row()
        self._is_slow = False
        stage = context.layout.names(Role.STAGE)
        self._stage_of = [
            tuple(context.layout.coordinates(rank)[name] for name in stage) for rank in range(context.world_size)
        ]

    # ---- as a recorder -----------------------------------------------------------------------------------------------

    def begin(self, name: str, attributes: Mapping[str, Any]) -> Any:
        """Note when a span began: a step, a wait for data, or the outermost collective."""
        if name == "step":
            self._away_ns = 0
        elif name != "data_wait":
            if "axis" not in attributes:
                return None
            self._inside += 1
            if self._inside > 1:
                return name, None
        return name, time.perf_counter_ns()

    def end(self, token: Any) -> None:
        """Add up what a span took."""
        if token is None:
            return
        name, begun = token
        took = 0 if begun is None else time.perf_counter_ns() - begun
        if name == "step":
            self._numbers.own[_NAME] = max(0, took - self._away_ns + self._data_ns) // 1000
            self._data_ns = 0
        elif name == "data_wait":
            self._data_ns += took
        else:
            self._inside -= 1
            self._away_ns += took

    # ---- of all ranks ------------------------------------------------------------------------------------------------

    def compare(self, state: StepState) -> None:
        """Compare the ranks' times of the step before, the same on all of them."""
        times = dict(zip(self._numbers.ranks, self._numbers.everyone.get(_NAME, ()), strict=False))
        if not times or not all(times.values()):  # before the second step
            return
        usual = {rank: self._usual(rank, times) for rank in times}
        known = {rank: others for rank, others in usual.items() if others}
        slow = [
            rank
            for rank, others in known.items()
            if times[rank] > self._options.ratio * others and times[rank] - others > 1e6 * self._options.least_s
        ]
        self._row.count(slow)
        named = [rank for rank, count in self._row.slow.items() if count >= self._options.steps]
        worst = max(named, key=lambda rank: times[rank] / usual[rank], default=None)
        state.metrics["slow_rank"] = _NOBODY if worst is None else float(worst)
        state.metrics["slowest_ratio"] = max((times[rank] / others for rank, others in known.items()), default=1.0)
        self._tell(state.step, named, times, usual)

    def _usual(self, rank: int, times: Mapping[int, int]) -> float:
        """Return the median of the others of a rank's stage; 0 without any."""
        peers = [own for other, own in times.items() if other != rank and self._stage_of[other] == self._stage_of[rank]]
        return float(median(peers)) if peers else 0.0

    def _tell(self, step: int, named: Sequence[int], times: Mapping[int, int], usual: Mapping[int, float]) -> None:
        """Log, and write down, where this rank has become slow, or is no more."""
        rank = self._context.rank
        if (rank in named) is self._is_slow:
            return
        self._is_slow = rank in named
        finding = ""
        if self._is_slow:
            own, others = times[rank] / 1e6, usual[rank] / 1e6
            host = socket.gethostname()
            finding = (
                f"{self._context.layout.who(rank)} on {host} is slow: its own work takes {1e3 * own:.1f} ms a step, "
                f"{own / others:.1f} times the {1e3 * others:.1f} ms of the others of its stage; if it stays so, drain "
                f"{host}"
            )
            log.warning("step %d: %s", step + 1, finding)
        folder = self._context.output / _NAME
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step + 1, "finding": finding}) + "\n")
