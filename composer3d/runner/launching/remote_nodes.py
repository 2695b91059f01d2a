"""Other machines of a run, as the coordinator sees them: what each sends over its connection, and is sent."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from composer3d.replicas import Connection
from composer3d.runner.launching.launcher import LaunchResult
from composer3d.runner.launching.node_messages import result_from_json, result_to_json

__all__ = ["Part", "RemoteNode", "WatchesNodes"]


class Part(Protocol):
    """The groups of one machine."""

    def start(self, group: int, attempt: int) -> None:
        """Start a group, after the end of an earlier start."""

    def kill(self, group: int) -> None:
        """End a group at once."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all groups."""


class WatchesNodes(Protocol):
    """A coordinator, as it takes what a machine sends."""

    def node_came(self, node: RemoteNode) -> None:
        """Start its groups."""

    def node_leaves(self, node: RemoteNode) -> None:
        """Let a machine leave that was asked to stop, or end the run where it is needed."""

    def node_lost(self, node: RemoteNode, reason: str) -> None:
        """Go on without a machine."""

    def group_ended(self, group: int, attempt: int, result: LaunchResult | None) -> None:
        """Act on the end of a group."""


class RemoteNode:
    """A machine with its connection, which handles its messages.

    A machine greets with its number, what it is called, and its fingerprint; it is ready once it has found the run's
    folder. Then it is sent the groups to start, and sends how they end.

    Args:
        connection: To it.
        rank: Its number.
        name: Its host name and process.
        groups: Numbers of its groups.
        coordinator: Who acts on its messages.
        running: Attempts of those that a lost coordinator had started, and that run.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        rank: int,
        name: str,
        groups: Sequence[int],
        coordinator: WatchesNodes,
        running: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._connection, self._coordinator = connection, coordinator
        self.rank, self.name, self.groups = rank, name, groups
        self.running = {group: attempt for group, attempt in running.items() if group in groups}
        self.is_ready = False

    def __str__(self) -> str:
        return f"node {self.rank} ({self.name})"

    # ---- what it sends -----------------------------------------------------------------------------------------------

    def take(self, message: Mapping[str, Any]) -> None:
        """Handle a message."""
        kind = message["do"]
        if kind == "ready" and not self.is_ready:
            self.is_ready = True
            self._coordinator.node_came(self)
        elif kind == "ended" and message["group"] in self.groups:
            result = None if message["result"] is None else result_from_json(message["result"])
            self._coordinator.group_ended(int(message["group"]), int(message["attempt"]), result)
        elif kind == "leave":
            self._coordinator.node_leaves(self)
        elif kind == "fail":
            self._connection.close(str(message["reason"])[:1000])
        else:
            raise ValueError(kind)

    def gone(self, reason: str) -> None:
        """Note the end of its connection."""
        self._coordinator.node_lost(self, reason)

    # ---- what it is sent ---------------------------------------------------------------------------------------------

    def start(self, group: int, attempt: int) -> None:
        """Have it start a group, after the end of an earlier start."""
        self._connection.send({"do": "start", "group": group, "attempt": attempt})

    def tell(self, known: Mapping[str, Any]) -> None:
        """Have it know what a machine that takes over has to."""
        self._connection.send({"do": "known", "run": known})

    def kill(self, group: int) -> None:
        """Have it end a group at once."""
        self._connection.send({"do": "kill", "group": group})

    def send(self, number: signal.Signals) -> None:
        """Have it pass a signal to its groups."""
        self._connection.send({"do": "signal", "number": int(number)})

    def end(self, result: LaunchResult) -> None:
        """Have it end all groups, and itself as the run has ended; it then closes the connection."""
        self._connection.send({"do": "end", "result": result_to_json(result)})

    def dismiss(self, reason: str) -> None:
        """End the connection."""
        self._connection.close(reason)
