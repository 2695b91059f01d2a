"""Gathered copies of FSDP2's parameters whose memory is freed until they are gathered again."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

__all__ = ["freed_copies", "gather_again"]


def freed_copies(units: Any) -> dict[int, str]:
    """Return the FQN of every parameter whose copy is freed, by the copy's `id`.

    Copies and their memory are attributes of FSDP2's groups, whose classes are private (torch 2.11-2.15).

    Args:
        units: From `watch_units`.
    """
    parameters = [p for group in units.groups if not group.is_unsharded for p in group.fsdp_params]
    return {id(p._unsharded_param): p._param_fqn for p in parameters if hasattr(p, "_unsharded_param")}


def gather_again(units: Any, copies: Set[int]) -> None:
    """Gather parameters into the memory that their freed copies had, which graphs have saved.

    Args:
        units: From `watch_units`.
        copies: By `id`.

    Collectives: an all-gather for each unit that has one of them.
    """
    for group in units.groups:
        own = (getattr(p, "_unsharded_param", None) for p in group.fsdp_params)
        if not group.is_unsharded and any(id(copy) in copies for copy in own):
            group.unshard()
            group.wait_for_unshard()
