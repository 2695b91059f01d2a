"""A plan for its readers: JSON, a screen, a page, and the difference between two."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.planning.reports.plan_difference import difference_to_json, show_difference
    from composer3d.planning.reports.plan_json import plan_to_json
    from composer3d.planning.reports.plan_page import plan_to_html
    from composer3d.planning.reports.plan_text import show_plan

_MODULES = {
    "plan_difference": ("difference_to_json", "show_difference"),
    "plan_json": ("plan_to_json",),
    "plan_page": ("plan_to_html",),
    "plan_text": ("show_plan",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "difference_to_json",
    "plan_to_html",
    "plan_to_json",
    "show_difference",
    "show_plan",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: some of these modules import torch, which takes a second."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
