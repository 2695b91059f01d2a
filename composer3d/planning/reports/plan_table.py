"""Several plans side by side, a row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer3d.planning.plan import Plan
from composer3d.planning.reports.plan_json import plan_to_json
from composer3d.planning.reports.plan_text import amount, rendered, size

__all__ = ["plans_to_json", "show_plans"]

_WIDEST = 4096  # a path is at most so long


def plans_to_json(plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Return plans by the manifest's name as JSON values."""
    return {"plans": [{"manifest": name, **plan_to_json(plan)} for name, plan in plans.items()]}


def show_plans(plans: Mapping[str, Plan]) -> str:
    """Return a table of plans: degrees, memory of the fullest rank, and where hardware was named the time of a step.

    A row is a line, however wide: figures that are wrapped cannot be compared.

    Args:
        plans: By the manifest's name.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    rows = [{"manifest": name, **_row(plan)} for name, plan in plans.items()]
    columns = [column for column in rows[0] if any(row.get(column) for row in rows)]
    for column in columns:
        table.add_column(
            column, no_wrap=True, justify="left" if column in ("manifest", "degrees", "verdict") else "right"
        )
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns))
    return "\n".join(line.rstrip() for line in rendered(table, width=_WIDEST).split("\n"))


def _row(plan: Plan) -> dict[str, str]:
    fullest = max(plan.ranks, key=lambda rank: rank.allocation.total)
    degrees = " ".join(f"{axis}={degree}" for axis, degree in plan.layout.degrees.items() if degree > 1)
    row = {
        "degrees": degrees or "1 rank",
        "ranks": f"{plan.layout.world_size:,}",
        "peak": size(fullest.trace.memory.peak),
        "device": size(fullest.allocation.total),
        "verdict": plan.verdict or "",
    }
    if plan.time is None:
        return row
    time, unit = plan.time, plan.time["unit"]
    step_s = time["step_s"]["value"]
    run, failures = time.get("training"), time.get("failures")
    if run is not None:
        run = run.get("with_failures", run)
        row |= {"days": amount(run["days"]["value"])}
        row |= {} if run["cost"] is None else {"cost": f"{run['currency']}{amount(run['cost']['value'])}"}
    if failures is not None:
        row |= {"goodput": _share(failures["goodput"]["value"])}
    return row | {
        "step": f"{amount(step_s)} s",
        f"{unit}/s each": amount(time[f"{unit}_per_s_per_device"]["value"]),
        "MFU": _share(time["mfu"]["value"]),
        "not hidden": _share(time["exposed_s"]["value"] / step_s),
        "bubble": _share(time["bubble_s"]["value"] / step_s),
    }


def _share(part: float) -> str:
    return f"{part:.1%}"
