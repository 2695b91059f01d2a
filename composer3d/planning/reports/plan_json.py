"""A plan as JSON; every figure with how it is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from composer3d.planning.costs.allocator import memory_figures
from composer3d.planning.costs.figure import Figure
from composer3d.planning.plan import Plan, RankPlan
from composer3d.planning.tracing.traced import RankTrace, Segment

__all__ = ["collective_rows", "flops_of", "plan_to_json"]


def collective_rows(trace: RankTrace) -> list[dict[str, Any]]:
    """Return a rank's collectives of a step: one row for each op, axis and plugin."""
    rows: dict[tuple[str, str | None, str | None], dict[str, Any]] = {}
    for segment, transfer in ((each, transfer) for each in trace.segments for transfer in each.transfers):
        key = (transfer.op, transfer.axis, transfer.plugin)
        row = rows.setdefault(
            key,
            {
                "op": transfer.op,
                "axis": transfer.axis,
                "plugin": transfer.plugin,
                "num_ranks": len(transfer.ranks),
                "count": 0,
                "bytes": 0,
                "wire_bytes": 0,
            },
        )
        row["count"] += segment.count * transfer.count
        row["bytes"] += segment.count * transfer.count * transfer.bytes
        row["wire_bytes"] += segment.count * transfer.wire_bytes
    return sorted(rows.values(), key=lambda row: (-row["wire_bytes"], row["op"], row["axis"] or ""))


def flops_of(segments: Iterable[Segment]) -> int:
    """Return the floating-point operations of a step, at local shapes."""
    return sum(segment.count * each.count * each.flops for segment in segments for each in segment.operators)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values; bytes are integers."""
    return {
        "world_size": plan.layout.world_size,
        "degrees": dict(plan.layout.degrees),
        "verdict": plan.verdict,
        "memory_bytes": plan.memory_bytes,
        "num_microbatches": plan.num_microbatches,
        "ranks": [_rank(rank) for rank in plan.ranks],
        "pipeline": _pipeline(plan),
        "time": plan.time,
        "advice": list(plan.advice),
        "notes": list(plan.notes),
    }


def _rank(rank: RankPlan) -> dict[str, Any]:
    trace = rank.trace
    memory = memory_figures(trace, rank.allocation)
    return {
        "rank": trace.rank,
        "coordinates": dict(trace.coordinates),
        "stands_for": trace.stands_for,
        "memory": {name: int(figure.value) for name, figure in memory.items()},
        "memory_bands": {name: [int(figure.low), math.ceil(figure.high)] for name, figure in memory.items()},
        "moment": trace.memory.moment,
        "module": trace.memory.module,
        "verdict": rank.verdict,
        "flops": flops_of(trace.segments),
        "collectives": collective_rows(trace),
        "is_extrapolated": trace.is_extrapolated,
        "provenance": _provenance(memory),
    }


def _provenance(memory: Mapping[str, Figure]) -> dict[str, str]:
    """Say of every figure of a rank how it is known."""
    return {
        **{name: figure.known for name, figure in memory.items()},
        **dict.fromkeys(("collectives", "flops"), "exact"),
        **dict.fromkeys(("moment", "module"), "traced"),
        "verdict": "modelled",
    }


def _pipeline(plan: Plan) -> dict[str, Any] | None:
    pipeline, found = plan.pipeline, plan.bubble
    if pipeline is None or found is None:
        return None
    return {
        "schedule": plan.schedule,
        "bubble": found.share,
        "bubble_relative": found.relative,
        "in_flight": list(pipeline.schedule.in_flight),
        "imbalance": found.imbalance,
        "stage_flops": {str(stage): flops for stage, flops in pipeline.stage_flops.items()},
        "provenance": {
            "bubble": "modelled",
            "in_flight": "exact",
            "imbalance": "modelled" if found.is_timed else "traced",
            "stage_flops": "traced",
        },
    }
