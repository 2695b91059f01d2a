"""A pipeline's step with the stages' own costs: bubble, micro-batches in flight, imbalance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer3d.interfaces import Action
from composer3d.planning.schedules.simulation import Simulation, StageCosts, simulate
from composer3d.planning.tracing.traced import RankTrace

__all__ = ["PipelinePlan", "plan_pipeline"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelinePlan:
    """Losses of a pipeline.

    Args:
        schedule: Its actions in time.
        stage_flops: Floating-point operations of one micro-batch's forward and backward, by stage; stages that were
            not traced have those of the nearest traced one before them.
        traced_stages: The stages whose costs are their own.
    """

    schedule: Simulation
    stage_flops: Mapping[int, int]
    traced_stages: frozenset[int]

    @property
    def imbalance(self) -> float:
        """The costliest stage over the mean of all, minus one."""
        values = list(self.stage_flops.values())
        return max(values) * len(values) / sum(values) - 1.0 if sum(values) else 0.0


def plan_pipeline(orders: Sequence[Sequence[Action]], traces: Sequence[RankTrace]) -> PipelinePlan:
    """Simulate a schedule whose stages cost what their operators say, in floating-point operations.

    Args:
        orders: Actions of every rank along pp.
        traces: Of some ranks.
    """
    flops: dict[int, dict[str, int]] = {}
    for trace in traces:
        for segment in trace.segments:
            if segment.kind in _KINDS:
                cost = sum(operator.count * operator.flops for operator in segment.operators)
                costs = flops.setdefault(segment.stage, {})
                kind = _KINDS[segment.kind]
                costs[kind] = max(costs.get(kind, 0), cost)
    stages = sorted({action.stage for order in orders for action in order})
    costs_of: dict[int, Mapping[str, int]] = {}
    for stage in stages:
        near = [index for index in sorted(flops) if index <= stage and (stage < stages[-1] or index == stage)]
        middle = [index for index in near if index not in (stages[0], stages[-1])]
        costs_of[stage] = flops[stage] if stage in flops else flops[(middle or near or sorted(flops))[-1]]
    totals = {stage: sum(costs.values()) for stage, costs in costs_of.items()}
    shortest = max(min(totals.values(), default=0), 1)

    times = {
        (stage, kind): max(_cost(costs, kind), shortest * 1e-6) for stage, costs in costs_of.items() for kind in "FBIW"
    }
    return PipelinePlan(
        schedule=simulate(orders, StageCosts(stages=times)),
        stage_flops=totals,
        traced_stages=frozenset(flops),
    )


def _cost(costs: Mapping[str, int], kind: str) -> float:
    """Return what an action costs by those that were traced; halves that were not are halves."""
    if kind == "F":
        return costs.get("F", 0)
    whole = costs.get("B", 0) or costs.get("I", 0) + costs.get("W", 0)
    return whole if kind == "B" else costs.get(kind, whole / 2)


_KINDS = {"forward": "F", "backward": "B", "input_backward": "I", "weight_backward": "W"}
