"""Connections of a membership server that are no rank's: what it and their handlers are to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

__all__ = ["Connection", "Refusal", "Visitor"]


class Connection(Protocol):
    """The server's side of a visitor's connection."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; without effect once the connection has ended."""

    def close(self, reason: str) -> None:
        """End the connection after what was sent, with the reason as its last message."""


class Refusal(NamedTuple):
    """Why a visitor is not let in.

    Args:
        reason: What it is told.
        again: Whether it may be let in later.
    """

    reason: str
    again: bool = False


class Visitor(Protocol):
    """A handler of messages of a connection that is no rank's."""

    def take(self, message: Mapping[str, Any]) -> None:
        """Handle a message; a KeyError, TypeError or ValueError ends the connection."""

    def gone(self, reason: str) -> None:
        """Note the end of the connection."""
