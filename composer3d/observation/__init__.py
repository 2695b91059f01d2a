"""Observation of a run without changing it: spans, collectives, and a report when one hangs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.observation.collectives import Collective, Collectives, count_collectives
    from composer3d.observation.flight_recorder import lost_a_peer
    from composer3d.observation.hang_report import Account, Fault, RecordedCollective, find_fault, told_act

_MODULES = {
    "collectives": ("Collective", "Collectives", "count_collectives"),
    "flight_recorder": ("lost_a_peer",),
    "hang_report": ("Account", "Fault", "RecordedCollective", "find_fault", "told_act"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Account",
    "Collective",
    "Collectives",
    "Fault",
    "RecordedCollective",
    "count_collectives",
    "find_fault",
    "lost_a_peer",
    "told_act",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: some of these modules import torch, which takes a second."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
