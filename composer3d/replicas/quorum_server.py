"""Membership server: one connection per rank that carries JSON lines, and timeouts.

It runs in one thread, that of the process that starts the ranks, so that this process can still fork. A rank that
dies is detected by its closed connection, one that is stopped by missing heartbeats. On one machine it listens on a
socket in a folder that this user alone can enter, of several on one address of the first. Other machines that start
groups have one connection each, as *visitors*. Messages are parsed as JSON of a few kinds, and never executed; who does
not begin with the run's token is sent away, and who does not begin at all makes room for others.
"""

from __future__ import annotations

import hmac
import json
import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from composer3d.replicas.membership import Membership, Messages, Place
from composer3d.replicas.policy import ReplicaPolicy

__all__ = ["Connection", "QuorumServer", "Refusal", "Visitor"]

_MOST_BYTES = 1 << 16  # maximum of a line, and of the buffer for a peer that does not read
_MOST_KEYS = 1 << 14
_STALL_S = 1.0  # a pause of this process, in which it received no heartbeats
_GREETING_S = 15.0  # at most, between connecting and the greeting
_LAST = 4  # times as long may the last group with the state be silent: nobody goes on without it
_MOST_STRANGERS = 64  # connections without a greeting; the oldest makes room

log = logging.getLogger(__name__)


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


@dataclass(kw_only=True, eq=False)
class _Peer:
    """A connection.

    Args:
        socket: Non-blocking.
        place: Place of the rank; None before its greeting.
        visitor: Who handles its messages, if it is no rank.
        heard: Time of the last message.
        received: Bytes of an incomplete line.
        unsent: Bytes that the peer has not read yet.
        wanted: Key whose value it waits for.
    """

    socket: socket.socket
    heard: float
    place: Place | None = None
    visitor: Visitor | None = None
    received: bytes = b""
    unsent: bytes = b""
    wanted: str | None = None


@dataclass(kw_only=True, eq=False)
class _Waiting:
    """Start times of the waits for groups."""

    groups: tuple[int, ...] = ()
    since: float = field(default_factory=time.monotonic)


class QuorumServer:
    """Carries the messages of a `Membership`.

    Args:
        listener: Listening socket, closed with the server.
        policy: Policy of the run.
        num_groups: Number of groups.
        num_ranks: Number of ranks per group.
        token: Name of the run, which every rank states.
        lost: Called with a group to end and the reason: no heartbeats, or too late for a step.
        admit: Called with a greeting of kind `node`, whose token is right, and the connection; returns who handles its
            messages, or a refusal.

    Memory: small. Collectives: none.
    """

    def __init__(
        self,
        listener: socket.socket,
        policy: ReplicaPolicy,
        *,
        num_groups: int,
        num_ranks: int,
        token: str,
        lost: Callable[[int, str], None],
        admit: Callable[[Mapping[str, Any], Connection], Visitor | Refusal] | None = None,
    ) -> None:
        self.membership = Membership(policy, num_groups=num_groups, num_ranks=num_ranks)
        self._policy, self._token, self._lost, self._admit = policy, token, lost, admit
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._places: dict[Place, _Peer] = {}
        self._values: dict[str, str] = {}
        self._values_of = -1
        self._looked, self._waiting, self._short = time.monotonic(), _Waiting(), _Waiting()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    # ---- loop --------------------------------------------------------------------------------------------------------

    def serve(self, seconds: float) -> None:
        """Handle messages for a given time, then timeouts."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif (peer := self._peers.get(key.fd)) is not None:
                self._flush(peer)
                self._read(peer)
        self._watch()

    def close(self, *, in_child: bool = False) -> None:
        """Close all connections; in a forked child, without notifying peers.

        Args:
            in_child: Leave the selector to the parent process.
        """
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        self._places.clear()
        self._listener.close()
        if not in_child:
            self._selector.close()

    def expect(self, group: int, attempt: int) -> None:
        """Record a restart of a group; see `Membership.expect`."""
        self._send(self.membership.expect(group, attempt))

    def lose(self, group: int, reason: str) -> None:
        """Remove a group whose processes have ended."""
        self._drop(group, reason)

    def begin_again(self) -> None:
        """Remove all groups; the run restarts from its checkpoint."""
        for group in {place.group for place in self._places}:
            self._drop(group, "the run begins again from its last checkpoint")
        self.membership.begin_again()

    # ---- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # already closed
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers = [peer for peer in self._peers.values() if _is_stranger(peer)]
        if len(strangers) >= _MOST_STRANGERS:
            self._end(strangers[0], "it did not say who it is")
        self._peers[connection.fileno()] = _Peer(socket=connection, heard=time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._end(peer, "its connection has ended" if peer.visitor else "a rank of it has ended")
        peer.heard = time.monotonic()
        *lines, peer.received = (peer.received + data).split(b"\n")
        if len(peer.received) > _MOST_BYTES:
            return self._end(peer, f"{_who(peer)} sent a line without an end")
        for line in lines:
            try:
                self._take(peer, json.loads(line))
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                log.debug("a message is none of ours: %s", error)
                return self._end(peer, f"{_who(peer)} sent what is no message")
            if peer.socket.fileno() < 0:
                return

    def _take(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        """Handle one message."""
        kind = message["do"]
        if peer.visitor is not None:
            if kind != "beat":
                return peer.visitor.take(message)
            # Answered, so that a machine notices that this one is gone, which may end no connection.
            return self._write(peer, {"do": "beat"})
        if peer.place is None:
            return self._greet(peer, message)
        if kind == "ask":
            step, stop, admits = int(message["step"]), bool(message["stop"]), bool(message["admits"])
            self._send(self.membership.ask(peer.place, step=step, stop=stop, admits=admits))
        elif kind == "vote":
            self._send(self.membership.vote(peer.place, ok=bool(message["ok"])))
        elif kind == "leave":
            self._send(self.membership.leave(peer.place))
        elif kind == "set":
            self._set(int(message["epoch"]), str(message["key"]), str(message["value"]))
        elif kind == "get":
            self._get(peer, int(message["epoch"]), str(message["key"]))
        elif kind != "beat":
            raise ValueError(kind)

    def _greet(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        """Register a rank or a visitor, or answer with the reason of a refusal."""
        if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
            raise ValueError("no greeting")
        if message["do"] == "node" and self._admit is not None:
            found = self._admit(message, _Connection(self, peer))
            if isinstance(found, Refusal):
                self._write(peer, {"do": "refused", **found._asdict()})
                return self._end(peer, found.reason)
            peer.visitor = found
            return None
        if message["do"] != "hello":
            raise ValueError("no greeting")
        place = Place(int(message["group"]), int(message["rank"]))
        refused = self.membership.come(place, attempt=int(message["attempt"]), setup=str(message["setup"]))
        if refused is not None:
            self._write(peer, {"refused": refused})
            return self._end(peer, refused)
        peer.place = place
        self._places[place] = peer
        self._write(peer, {"has_begun": self.membership.has_begun})

    def _end(self, peer: _Peer, reason: str) -> None:
        """Close a connection; the group of its rank is lost with it."""
        descriptor = peer.socket.fileno()
        if descriptor < 0:
            return
        if peer.visitor is not None:
            self._write(peer, {"do": "out", "reason": reason})
        self._selector.unregister(peer.socket)
        self._peers.pop(descriptor, None)
        peer.socket.close()
        if peer.place is not None and self._places.get(peer.place) is peer:
            self._places.pop(peer.place)
            self._drop(peer.place.group, reason)
        if peer.visitor is not None:
            peer.visitor.gone(reason)

    def _drop(self, group: int, reason: str) -> None:
        self._send(self.membership.lose(group, reason))
        for place in [place for place in self._places if place.group == group]:
            self._end(self._places[place], reason)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _send(self, messages: Messages) -> None:
        for place, message in messages:
            peer = self._places.get(place)
            if "broken" in message:
                self._forget_values()
            if peer is not None:
                self._write(peer, message)

    def _write(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        peer.unsent += (json.dumps(message) + "\n").encode()
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        while peer.unsent:
            try:
                peer.unsent = peer.unsent[peer.socket.send(peer.unsent) :]
            except BlockingIOError:
                return  # a stopped peer, which the missing heartbeats will remove
            except OSError:
                peer.unsent = b""
                return

    # ---- key-value store of an epoch, for addresses ------------------------------------------------------------------

    def _set(self, epoch: int, key: str, value: str) -> None:
        if epoch != self.membership.epoch or len(self._values) > _MOST_KEYS:
            return
        if epoch != self._values_of:
            self._forget_values()
            self._values_of = epoch
        self._values[key] = value
        for peer in list(self._peers.values()):
            if peer.wanted == key:
                peer.wanted = None
                self._write(peer, {"value": value})

    def _get(self, peer: _Peer, epoch: int, key: str) -> None:
        membership = self.membership
        if epoch != membership.epoch or len(membership.left) != len(membership.members):
            self._write(peer, {"value": None})  # the rank that would set it may be lost
        elif epoch == self._values_of and key in self._values:
            self._write(peer, {"value": self._values[key]})
        else:
            peer.wanted = key

    def _forget_values(self) -> None:
        """Drop an epoch's values and answer pending reads with None."""
        self._values.clear()
        for peer in list(self._peers.values()):
            if peer.wanted is not None:
                peer.wanted = None
                self._write(peer, {"value": None})

    # ---- timeouts ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Remove groups without heartbeats, or that others have waited for too long."""
        now = time.monotonic()
        if now - self._looked > _STALL_S:  # this process was paused itself
            for peer in self._peers.values():
                peer.heard += now - self._looked
        self._looked = now
        for place, peer in list(self._places.items()):
            limit = self._policy.silent_s * (_LAST if self.membership.left == (place.group,) else 1)
            if now - peer.heard > limit and self._places.get(place) is peer:
                self._expel(place.group, f"rank {place.rank} of it was not heard of for {limit:g} s")
        for peer in list(self._peers.values()):
            if _is_stranger(peer) and now - peer.heard > min(self._policy.silent_s, _GREETING_S):
                self._end(peer, "it did not say who it is")
            elif peer.visitor is not None and now - peer.heard > self._policy.silent_s:
                self._end(peer, f"it was not heard of for {self._policy.silent_s:g} s")
        late = self.membership.waited_for()
        if late != self._waiting.groups:
            self._waiting = _Waiting(groups=late, since=now)
        if late and now - self._waiting.since > self._policy.late_s:
            for group in late:
                self._expel(group, f"it did not come to the step for {self._policy.late_s:g} s")

    def _expel(self, group: int, reason: str) -> None:
        self._drop(group, reason)
        self._lost(group, reason)

    def short_for(self) -> float:
        """Return for how many seconds ready groups have waited for others to join."""
        now = time.monotonic()
        is_short = self.membership.is_short()
        if is_short != bool(self._short.groups):
            self._short = _Waiting(groups=(0,) if is_short else (), since=now)
        return now - self._short.since if is_short else 0.0

    def go_without_the_rest(self) -> None:
        """Form an epoch of the connected groups."""
        self._send(self.membership.form())


class _Connection:
    """The server as a visitor's handler sees it."""

    def __init__(self, server: QuorumServer, peer: _Peer) -> None:
        self._server, self._peer = server, peer

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self._server._write(self._peer, message)

    def close(self, reason: str) -> None:
        """End the connection."""
        self._server._end(self._peer, reason)


def _is_stranger(peer: _Peer) -> bool:
    return peer.place is None and peer.visitor is None


def _who(peer: _Peer) -> str:
    return "it" if peer.visitor is not None else "a rank of it"
