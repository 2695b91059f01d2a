"""Ranks of torchrun where nodes come and go: the names of their worlds, and how a world ends that another follows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from composer3d.processes import launch_round, note_round
from composer3d.runner.launching.node_counts import world_sizes

if TYPE_CHECKING:
    from composer3d.manifest import Manifest
    from composer3d.runner.reporting.outcome import Outcome

__all__ = ["begin_world", "leave_world"]

_NOTICE_S = 5.0  # agents look for nodes that wait each 0.1 s, and signal their ranks then
_LOOK_S = 0.05
_FAILED = 3
_SHARED = (
    "run.nodes: torchrun's agents share a store, in which a node that comes later waits for ever (torch 2.13); set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
)


def begin_world(manifest: Manifest, report: Callable[[str], None]) -> None:
    """Give the world of this rank a name, where the manifest states several world sizes.

    Args:
        manifest: Of the run.
        report: Called on rank 0, where torchrun was started so that no node can come later.
    """
    if len(world_sizes(manifest)) < 2 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    note_round()
    is_several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    if launch_round() is None and is_several and os.environ["RANK"] == "0":
        report(_SHARED)


def leave_world(outcome: Outcome) -> None:
    """End this rank so that its agent goes on, where the world was stopped for another node.

    All ranks stop and save where one is signalled. The agent of one that was not would take its good end for that of
    the run: it is given the time to signal it, and an error then, after which it starts the ranks again.

    Args:
        outcome: The rank's.

    Raises:
        SystemExit: The rank was not signalled itself.
    """
    if launch_round() is None or outcome.status != "preempted" or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        return
    deadline = time.monotonic() + _NOTICE_S
    while time.monotonic() < deadline:  # SIGTERM ends the process here, as its agent expects
        time.sleep(_LOOK_S)
    raise SystemExit(_FAILED)
