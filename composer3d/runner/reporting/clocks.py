"""Clocks of machines that disagree: reports order failures of several machines by them."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from composer3d import all_gather_json

if TYPE_CHECKING:
    from composer3d import RunContext

__all__ = ["compare_clocks"]

_MOST_S = 1.0  # and what ranks need to leave a collective one after the other

log = logging.getLogger(__name__)


def compare_clocks(context: RunContext, *, now: Callable[[], float] = time.time) -> dict[str, float]:
    """Warn of machines whose clock is off, before the first step; on the first rank.

    Which rank failed first, and which one the others wait for, is told by times that several machines wrote.

    Args:
        context: Of the run.
        now: This machine's clock, in seconds.

    Returns:
        Seconds by which the clocks of such machines are ahead, by host.

    Collectives: on several machines three all-gathers of small values.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", context.world_size)) >= context.world_size:
        return {}
    all_gather_json(None)  # all ranks look at their clocks as they leave it
    read = now()
    began = time.monotonic()
    told = all_gather_json([socket.gethostname(), read])
    waited = max(all_gather_json(time.monotonic() - began))  # for a rank that was held up as it looked
    usual = median(seen for _, seen in told)
    ahead = {host: seen - usual for host, seen in told if abs(seen - usual) > _MOST_S + waited}
    if context.rank == 0:
        for host, seconds in sorted(ahead.items()):
            where = "ahead of" if seconds > 0 else "behind"
            log.warning(
                "the clock of %s is %.1f s %s those of the other machines: reports of failures and composer3d doctor "
                "order what happened by it; set it (chronyc makestep, or ntpd)",
                host,
                abs(seconds),
                where,
            )
    return ahead
