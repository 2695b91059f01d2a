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
from typing import Any

from composer3d.replicas.epoch_values import EpochValues
from composer3d.replicas.membership import Membership, Messages, Place
from composer3d.replicas.peers import Peer, VisitorConnection
from composer3d.replicas.policy import ReplicaPolicy
from composer3d.replicas.resumption import Standing, settle
from composer3d.replicas.standings import Standings
from composer3d.replicas.visitors import Connection, Refusal, Visitor

__all__ = ["QuorumServer"]

_MOST_BYTES = 1 << 16  # maximum of a line, and of the buffer for a peer that does not read
_STALL_S = 1.0  # a pause of this process, in which it received no heartbeats
_GREETING_S = 15.0  # at most, between connecting and the greeting
_WAITS = 5  # messages within the time of silence, to ranks that wait for a server that takes over
_LAST = 4  # times as long may the last group with the state be silent: nobody goes on without it
_MOST_STRANGERS = 64  # connections without a greeting; the oldest makes room

log = logging.getLogger(__name__)


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
        takes_over: Whether another server was lost: ranks state what they know, until `resume` is called.

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
        takes_over: bool = False,
    ) -> None:
        self.membership = Membership(policy, num_groups=num_groups, num_ranks=num_ranks)
        self._policy, self._token, self._lost, self._admit = policy, token, lost, admit
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._peers: dict[int, Peer] = {}
        self._places: dict[Place, Peer] = {}
        self._values = EpochValues()
        self._standings = Standings(num_groups, num_ranks) if takes_over else None
        self._wait_at = 0.0
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
                peer.flush()
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

    @property
    def standings(self) -> Standings | None:
        """Standings of ranks that have come to a server that takes over; None once it has."""
        return self._standings

    def resume(self, running: Mapping[int, int], *, term: int, has_begun: bool) -> None:
        """Decide on the step in flight, tell all ranks that have come, and go on with them.

        Args:
            running: Attempt of each group that runs; others are out.
            term: Of this server.
            has_begun: Whether the run had begun, as far as is known.
        """
        assert self._standings is not None, "takes over"
        stated, self._standings = self._standings, None
        known = {group: ranks for group, ranks in stated.groups.items() if stated.attempts[group] == running.get(group)}
        for group in set(stated.groups) - set(known):
            self._put_out(group, "it is none of those that run")
        settled = settle(known, term=term, num_ranks=stated.num_ranks, has_begun=has_begun)
        ranks = {Place(group, rank): running[group] for group, found in known.items() for rank in found}
        now = time.monotonic()
        for place, message in self.membership.resume(settled, ranks, setup=stated.setup):
            peer = self._places[place]
            peer.heard = now
            is_new = place in stated.fresh and "resumed" in message
            peer.write(self._greeted() if is_new else message)
        for group, reason in settled.out.items():
            self._put_out(group, reason)

    def _put_out(self, group: int, reason: str) -> None:
        """Tell the ranks of a group that takes no part that they are out."""
        for peer in [peer for place, peer in self._places.items() if place.group == group]:
            peer.write({"out": reason})
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
        strangers = [peer for peer in self._peers.values() if peer.is_stranger]
        if len(strangers) >= _MOST_STRANGERS:
            self._end(strangers[0], "it did not say who it is")
        self._peers[connection.fileno()] = Peer(socket=connection, heard=time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, peer: Peer) -> None:
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
            return self._end(peer, f"{peer.subject} sent a line without an end")
        for line in lines:
            try:
                self._take(peer, json.loads(line))
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                log.debug("a message is none of ours: %s", error)
                return self._end(peer, f"{peer.subject} sent what is no message")
            if peer.socket.fileno() < 0:
                return

    def _take(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Handle one message."""
        kind = message["do"]
        if peer.visitor is not None:
            if kind != "beat":
                return peer.visitor.take(message)
            # Answered, so that a machine notices that this one is gone, which may end no connection.
            return peer.write({"do": "beat"})
        if peer.place is None:
            return self._greet(peer, message)
        if kind == "ask":
            step, stop, admits = int(message["step"]), bool(message["stop"]), bool(message["admits"])
            self._send(self.membership.ask(peer.place, step=step, stop=stop, admits=admits))
        elif kind == "vote":
            self._send(self.membership.vote(peer.place, ok=bool(message["ok"])))
        elif kind == "leave":
            self._send(self.membership.leave(peer.place))
            if peer.may_move:
                peer.write({"left": True})
        elif kind == "set":
            self._set(int(message["epoch"]), str(message["key"]), str(message["value"]))
        elif kind == "get":
            self._get(peer, int(message["epoch"]), str(message["key"]))
        elif kind != "beat":
            raise ValueError(kind)
        elif peer.may_move:
            peer.write({"do": "beat"})

    def _greet(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Register a rank or a visitor, or answer with the reason of a refusal."""
        if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
            raise ValueError("no greeting")
        if message["do"] == "node" and self._admit is not None:
            found = self._admit(message, VisitorConnection(peer, end=self._end))
            if isinstance(found, Refusal):
                peer.write({"do": "refused", **found._asdict()})
                return self._end(peer, found.reason)
            peer.visitor = found
            return None
        if message["do"] != "hello":
            raise ValueError("no greeting")
        place, setup = Place(int(message["group"]), int(message["rank"])), str(message["setup"])
        attempt = int(message["attempt"])
        standing = Standing.from_json(message["standing"]) if "standing" in message else None
        peer.may_move = bool(message.get("several"))
        if self._standings is not None:
            if place in self._places:  # the end of an earlier connection was not seen yet
                return self._end(peer, "it is to come again")
            refused = self._standings.come(place, attempt=attempt, setup=setup, standing=standing)
            answer: Mapping[str, Any] = {"wait": True}
        elif standing is not None and not (standing.is_new and self.membership.resolution is not None):
            peer.write({"elsewhere": "the others have gone on without it"})
            return self._end(peer, "it came too late")
        else:
            refused = self.membership.come(place, attempt=attempt, setup=setup)
            answer = self._greeted() if standing is None else {"resumed": self._resolution()}
        if refused is not None:
            peer.write({"refused": refused})
            return self._end(peer, refused)
        peer.place = place
        self._places[place] = peer
        peer.write(answer)

    def _greeted(self) -> Mapping[str, Any]:
        """Return the answer to a rank's first greeting."""
        known = {} if self.membership.resolution is None else {"resolution": self._resolution()}
        return {"has_begun": self.membership.has_begun, **known}

    def _resolution(self) -> Mapping[str, Any] | None:
        found = self.membership.resolution
        return None if found is None else found.to_json()

    def _end(self, peer: Peer, reason: str) -> None:
        """Close a connection; the group of its rank is lost with it."""
        descriptor = peer.socket.fileno()
        if descriptor < 0:
            return
        if peer.visitor is not None:
            peer.write({"do": "out", "reason": reason})
        self._selector.unregister(peer.socket)
        self._peers.pop(descriptor, None)
        self._values.leave(descriptor)
        peer.socket.close()
        if peer.place is not None and self._places.get(peer.place) is peer:
            self._places.pop(peer.place)
            if self._standings is not None:
                self._standings.leave(peer.place)
            else:
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
                self._answer(self._values.forget(), None)
            if peer is not None:
                peer.write(message)

    # ---- key-value store of an epoch, for addresses ------------------------------------------------------------------

    def _set(self, epoch: int, key: str, value: str) -> None:
        if epoch == self.membership.epoch:
            self._answer(self._values.set(epoch, key, value), value)

    def _get(self, peer: Peer, epoch: int, key: str) -> None:
        membership = self.membership
        if epoch != membership.epoch or len(membership.left) != len(membership.members):
            peer.write({"value": None})  # the rank that would set it may be lost
        elif (value := self._values.get(epoch, key, reader=peer.socket.fileno())) is not None:
            peer.write({"value": value})

    def _answer(self, readers: list[int], value: str | None) -> None:
        for reader in readers:
            self._peers[reader].write({"value": value})

    # ---- timeouts ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Remove groups without heartbeats, or that others have waited for too long."""
        now = time.monotonic()
        if now - self._looked > _STALL_S:  # this process was paused itself
            for peer in self._peers.values():
                peer.heard += now - self._looked
        self._looked = now
        if self._standings is not None:
            return self._keep_waiting(now)
        for peer in list(self._peers.values()):  # machines before their ranks: with one, its groups are lost
            if peer.is_stranger and now - peer.heard > min(self._policy.silent_s, _GREETING_S):
                self._end(peer, "it did not say who it is")
            elif peer.visitor is not None and now - peer.heard > self._policy.silent_s:
                self._end(peer, f"it was not heard of for {self._policy.silent_s:g} s")
        for place, peer in list(self._places.items()):
            limit = self._policy.silent_s * (_LAST if self.membership.left == (place.group,) else 1)
            if now - peer.heard > limit and self._places.get(place) is peer:
                self._expel(place.group, f"rank {place.rank} of it was not heard of for {limit:g} s")
        late = self.membership.waited_for()
        if late != self._waiting.groups:
            self._waiting = _Waiting(groups=late, since=now)
        if late and now - self._waiting.since > self._policy.late_s:
            for group in late:
                self._expel(group, f"it did not come to the step for {self._policy.late_s:g} s")

    def _keep_waiting(self, now: float) -> None:
        """Have ranks that have come know that this server lives, until those that have not come are given up."""
        if now > self._wait_at:
            self._wait_at = now + self._policy.silent_s / _WAITS
            for peer in list(self._places.values()):
                peer.write({"wait": True})

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
