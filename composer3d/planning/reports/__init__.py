"""A plan for its readers: JSON, a screen, a page, and the difference between two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes import late_imports

if TYPE_CHECKING:
    from composer3d.planning.reports.plan_difference import difference_to_json, show_difference
    from composer3d.planning.reports.plan_json import plan_to_json
    from composer3d.planning.reports.plan_page import plan_to_html
    from composer3d.planning.reports.plan_table import plans_to_json, show_plans
    from composer3d.planning.reports.plan_text import show_plan, size

_MODULES = {
    "plan_difference": ("difference_to_json", "show_difference"),
    "plan_json": ("plan_to_json",),
    "plan_page": ("plan_to_html",),
    "plan_table": ("plans_to_json", "show_plans"),
    "plan_text": ("show_plan", "size"),
}

__all__ = [
    "difference_to_json",
    "plan_to_html",
    "plan_to_json",
    "plans_to_json",
    "show_difference",
    "show_plan",
    "show_plans",
    "size",
]

__getattr__ = late_imports(__name__, _MODULES)
