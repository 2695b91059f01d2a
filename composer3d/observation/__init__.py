"""Observation of a run without changing it: spans, collectives, and a report when one hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes.late_imports import late_imports

if TYPE_CHECKING:
    from composer3d.observation.call_sites import beside, raised_in
    from composer3d.observation.collectives import Collective, Collectives, count_collectives
    from composer3d.observation.hang_report import Account, Fault, RecordedCollective, find_fault, told_act
    from composer3d.observation.lost_peers import lost_a_peer
    from composer3d.observation.mismatch_ending import aborting

_MODULES = {
    "call_sites": ("beside", "raised_in"),
    "collectives": ("Collective", "Collectives", "count_collectives"),
    "hang_report": ("Account", "Fault", "RecordedCollective", "find_fault", "told_act"),
    "lost_peers": ("lost_a_peer",),
    "mismatch_ending": ("aborting",),
}

__all__ = [
    "Account",
    "Collective",
    "Collectives",
    "Fault",
    "RecordedCollective",
    "aborting",
    "beside",
    "count_collectives",
    "find_fault",
    "lost_a_peer",
    "raised_in",
    "told_act",
]

__getattr__ = late_imports(__name__, _MODULES)
