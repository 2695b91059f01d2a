"""Options of process groups; collectives that change numbers on purpose: codecs, and what `verify` knows of them."""

from __future__ import annotations

from composer3d.communication.coded_collectives import (
    AllReduce,
    Codec,
    CodedCollectives,
    CodedExchange,
    Held,
    ReplicaReduction,
    ReplicaReductions,
)
from composer3d.communication.group_options import GroupOptions, NCCLOptions

__all__ = [
    "AllReduce",
    "Codec",
    "CodedCollectives",
    "CodedExchange",
    "GroupOptions",
    "Held",
    "NCCLOptions",
    "ReplicaReduction",
    "ReplicaReductions",
]
