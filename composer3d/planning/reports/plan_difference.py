"""Two plans side by side: which terms moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer3d.planning.plan import Plan
from composer3d.planning.reports.plan_json import collective_rows, flops_of
from composer3d.planning.reports.plan_text import memory_parts, size

__all__ = ["Term", "difference_to_json", "moved_terms", "show_difference"]

# Of these a rank holds as much at its peak; in `--json` of one plan other figures have the short names.
_AT_PEAK = {name: f"{name} at peak" for name in ("gradients", "activations")}


@dataclass(frozen=True, kw_only=True)
class Term:
    """One figure in two plans.

    Args:
        group: `memory`, `wire`, `compute`, `pipeline`, or `time` where both plans have it.
        name: Of the figure.
        before: In the first plan, of its fullest rank.
        after: In the second one.
    """

    group: str
    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """The second less the first."""
        return self.after - self.before


def moved_terms(before: Plan, after: Plan) -> list[Term]:
    """Return the terms that differ between the fullest ranks of two plans, by group and the size of the change."""
    found: list[Term] = []
    groups = ("memory", "wire", "compute", "pipeline", "time")
    if before.time is None or after.time is None:
        before, after = replace(before, time=None), replace(after, time=None)
    for group, one, other in zip(groups, _terms(before), _terms(after), strict=True):
        names = [*one, *(name for name in other if name not in one)]
        terms = [Term(group=group, name=n, before=one.get(n, 0.0), after=other.get(n, 0.0)) for n in names]
        found += sorted((term for term in terms if term.change), key=lambda term: -abs(term.change))
    return found


def _terms(plan: Plan) -> tuple[dict[str, float], ...]:
    rank = plan.ranks[0]
    parts = {_AT_PEAK.get(name, name): value for name, value in memory_parts(rank).items()}
    memory: dict[str, float] = {**parts, "peak": rank.trace.memory.peak, "total": rank.allocation.total}
    wire: dict[str, float] = {}
    for row in collective_rows(rank.trace):
        name = f"{row['op']} over {row['axis']} of {row['plugin'] or 'the core'}"
        wire[name] = wire.get(name, 0.0) + row["wire_bytes"]
    compute: dict[str, float] = {"FLOPs": flops_of(rank.trace.segments)}
    pipeline = {} if plan.bubble is None else {"bubble": plan.bubble.share}
    return memory, wire, compute, pipeline, {} if plan.time is None else _times(plan.time)


def _times(time: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by what they are spent on, and those of each axis's communication."""
    shown = {"step": "step_s", "compute": "compute_s", "exposed communication": "exposed_s", "bubble": "bubble_s"}
    found = {name: time[key]["value"] for name, key in shown.items()}
    by_axis: dict[str, float] = {}
    for row in time["communication"]:
        parts = {"waited for": row["blocking_s"], "beside compute": row["seconds"] - row["blocking_s"]}
        for part, seconds in parts.items():
            name = f"communication over {row['axis']} {part}"
            by_axis[name] = by_axis.get(name, 0.0) + seconds
    offloaded = {f"offloading: {row['what']}": row["seconds"] for row in time.get("offloading", ())}
    return found | by_axis | offloaded


def difference_to_json(before: Plan, after: Plan) -> dict[str, Any]:
    """Return the terms that moved as JSON values."""
    terms = moved_terms(before, after)
    return {
        "ranks": [plan.ranks[0].trace.rank for plan in (before, after)],
        "world_sizes": [plan.layout.world_size for plan in (before, after)],
        "hardware": None if before.time is None else before.time["hardware"],
        "terms": [
            {"group": t.group, "name": t.name, "before": t.before, "after": t.after, "change": t.change} for t in terms
        ],
    }


def show_difference(before: Plan, after: Plan) -> str:
    """Return the terms that moved as text."""
    ranks = [plan.ranks[0].trace.rank for plan in (before, after)]
    lines = [
        f"{before.layout} = {before.layout.world_size} ranks -> {after.layout} = {after.layout.world_size} ranks",
        f"the fullest rank, {ranks[0]} -> {ranks[1]}:",
    ]
    for term in moved_terms(before, after):
        lines.append(
            f"{term.group:<9} {term.name:<44} {_value(term, term.before):>12} -> {_value(term, term.after):>12}"
        )
        lines[-1] += f"  {'+' if term.change > 0 else '-'}{_value(term, abs(term.change))}"
    return "\n".join(lines if len(lines) > 2 else [*lines, "nothing moved"])


def _value(term: Term, value: float) -> str:
    if term.group == "pipeline":
        return f"{value:.1%}"
    if term.group == "time":
        return f"{value:.4g} s"
    return f"{value:.3g}" if term.group == "compute" else size(value)
