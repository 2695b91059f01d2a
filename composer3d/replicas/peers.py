"""Connections of a membership server, each with what was not received or sent whole yet."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer3d.replicas.membership import Place
from composer3d.replicas.visitors import Visitor

__all__ = ["Peer", "VisitorConnection"]


@dataclass(kw_only=True, eq=False)
class Peer:
    """A connection.

    Args:
        socket: Non-blocking.
        heard: Time of the last message.
        place: Place of the rank; None before its greeting.
        visitor: Who handles its messages, if it is no rank.
        received: Bytes of an incomplete line.
        unsent: Bytes that the peer has not read yet.
        may_move: Whether the rank knows of other servers: its heartbeats are answered.
    """

    socket: socket.socket
    heard: float
    place: Place | None = None
    visitor: Visitor | None = None
    received: bytes = b""
    unsent: bytes = b""
    may_move: bool = False

    @property
    def is_stranger(self) -> bool:
        """Whether it has not said who it is."""
        return self.place is None and self.visitor is None

    @property
    def subject(self) -> str:
        """Its name in a reason."""
        return "it" if self.visitor is not None else "a rank of it"

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a message, now or when the peer reads."""
        self.unsent += (json.dumps(message) + "\n").encode()
        self.flush()

    def flush(self) -> None:
        """Send what the peer reads now; a stopped one will be removed by its missing heartbeats."""
        while self.unsent:
            try:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
            except BlockingIOError:
                return
            except OSError:
                self.unsent = b""
                return


class VisitorConnection:
    """The server as a visitor's handler sees it.

    Args:
        peer: The connection.
        end: Ends it, with a reason.
    """

    def __init__(self, peer: Peer, *, end: Callable[[Peer, str], None]) -> None:
        self._peer, self._end = peer, end

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self._peer.write(message)

    def close(self, reason: str) -> None:
        """End the connection."""
        self._end(self._peer, reason)
