"""Replica groups that train one model and may leave and rejoin: membership, and exchange between groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes.late_imports import late_imports

if TYPE_CHECKING:
    from composer3d.replicas.endpoint import connect, host_and_port, listen, reserve
    from composer3d.replicas.group_exchange import Exchange, ExchangeError
    from composer3d.replicas.group_size import ranks_of_group
    from composer3d.replicas.membership import NOTHING, Membership, Place
    from composer3d.replicas.policy import ReplicaPolicy
    from composer3d.replicas.quorum_client import (
        ADDRESS,
        ATTEMPT,
        GROUP,
        TOKEN,
        Quorum,
        QuorumClient,
        address_of_quorum,
    )
    from composer3d.replicas.quorum_server import QuorumServer
    from composer3d.replicas.visitors import Connection, Refusal, Visitor

_MODULES = {
    "endpoint": ("connect", "host_and_port", "listen", "reserve"),
    "group_exchange": ("Exchange", "ExchangeError"),
    "group_size": ("ranks_of_group",),
    "membership": ("Membership", "NOTHING", "Place"),
    "policy": ("ReplicaPolicy",),
    "quorum_client": ("ADDRESS", "ATTEMPT", "GROUP", "Quorum", "QuorumClient", "TOKEN", "address_of_quorum"),
    "quorum_server": ("QuorumServer",),
    "visitors": ("Connection", "Refusal", "Visitor"),
}

__all__ = [
    "ADDRESS",
    "ATTEMPT",
    "Connection",
    "Exchange",
    "ExchangeError",
    "GROUP",
    "Membership",
    "NOTHING",
    "Place",
    "Quorum",
    "QuorumClient",
    "QuorumServer",
    "Refusal",
    "ReplicaPolicy",
    "TOKEN",
    "Visitor",
    "address_of_quorum",
    "connect",
    "host_and_port",
    "listen",
    "ranks_of_group",
    "reserve",
]

__getattr__ = late_imports(__name__, _MODULES)
