"""A machine that may serve the run once the one that serves is lost: whom it asks first, and when it takes over."""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer3d.errors import RendezvousError
from composer3d.replicas import ReplicaPolicy, reserve
from composer3d.runner.launching.known_run import KnownRun
from composer3d.runner.launching.node_place import NodePlace, host_name
from composer3d.runner.launching.seat import Fenced, Seat
from composer3d.runner.launching.terms import Term, Terms, newest_term

__all__ = ["Successor"]

log = logging.getLogger(__name__)


class Successor:
    """The acts of a machine that finds the one that serves lost.

    It asks all that may serve, in order and again. Where nobody answers, and no machine of the list before it is there,
    it claims the next term at once; one after others gives each of these some time before. It does not listen before:
    a machine that asks is refused by its kernel at once, which no answer could do faster or say better. Its port is
    reserved from the start, so that a wrong address is found then; the machine that serves is asked first, since it
    may know who has the port.

    Args:
        place: Of this machine.
        policy: Of the groups.
        output: The run's folder, whose newest term says who serves a run that is there already.

    Attributes:
        identity: Of this process, in the terms.
        known: What the machine that served knew last.
        mark: Name of the folder of the terms in the run's folder.
        server: Number of the machine that serves, or served last.
        socket: Reserved; None where this machine is not in the list, or the others have another address of it.
        obstacle: This machine's address in the list is none of its own, or its port is taken.
    """

    def __init__(self, place: NodePlace, policy: ReplicaPolicy, output: Path) -> None:
        self._place, self._policy = place, policy
        self.identity = uuid.uuid4().hex
        self.known = KnownRun()
        self.mark, self.server = "", 0
        self._terms: Terms | None = None
        self._number, self._lost_at = 0, 0.0
        self._output = output
        self._listed = [(node, each) for node, each in enumerate(place.endpoints) if node != place.rank]
        self._others, self._next = self._listed, 0
        self._has_answered = False
        self.socket: socket.socket | None = None
        self.obstacle: RendezvousError | None = None
        self._reserve()

    def _reserve(self) -> None:
        """Reserve this machine's port, if it is in the list."""
        rank, self.obstacle = self._place.rank, None
        if self.socket is not None or rank >= len(self._place.endpoints):
            return
        try:
            self.socket = reserve(self._place.endpoints[rank], node=rank)
        except RendezvousError as error:
            self.obstacle = error

    def close(self) -> None:
        """Close the reserved socket."""
        if self.socket is not None:
            self.socket.close()

    # ---- while another one serves ------------------------------------------------------------------------------------

    def welcomed(self, message: Mapping[str, Any], output: Path) -> None:
        """Note who serves, in which term, and whether the others have this machine's address.

        Args:
            message: Its welcome.
            output: The run's folder.

        Raises:
            RendezvousError: This machine's address in the list is none of its own, or its port is taken.
        """
        self._reserve()  # an earlier process of this machine may have ended meanwhile
        if self.obstacle is not None:
            raise self.obstacle
        self.mark = Path(str(message["mark"])).name
        self._terms = Terms(output / self.mark)
        self.server, self._number = int(message["node"]), int(message["term"])
        self._others, self._next = [each for each in self._others if each[0] != self._place.rank], 0
        self._compare([str(address)[:300] for address in message["endpoints"]])

    def _compare(self, listed: Sequence[str]) -> None:
        """Note addresses that the machine that serves has otherwise: this one's would not be found."""
        own, rank = self._place.endpoints, self._place.rank
        if list(own) == list(listed):
            return
        is_found = rank >= len(own) or own[rank] == listed[rank]
        if not is_found:
            self.close()
            self.socket = None
        log.warning(
            "this machine, node %d, was started with --endpoint %s, and node %d with %s%s",
            rank,
            self._place.endpoint,
            self.server,
            ",".join(listed),
            "" if is_found else ": the others would not find this one, which does not take over from another",
        )

    def _with_the_newest(self) -> list[tuple[int, str]]:
        """Return the others, with the machine that serves by the run's folder: the list may have another address."""
        newest = newest_term(self._output)
        if newest is None or newest.address in ("", *(address for _, address in self._listed)):
            return self._listed
        return [(newest.node, newest.address), *self._listed]

    def told(self, message: Mapping[str, Any]) -> None:
        """Note what the machine that serves knows."""
        self.known, self._number = KnownRun.from_json(message["run"]), int(message["run"]["term"])

    # ---- once it is lost ---------------------------------------------------------------------------------------------

    def lost(self) -> None:
        """Note that the machine that served is lost; it is asked after the others."""
        self._lost_at, self._next, self._has_answered = time.monotonic(), 0, False
        self._others.sort(key=lambda each: (each[0] == self.server, each[0]))

    def answered(self) -> None:
        """Note that one of the others answers."""
        self._has_answered = True

    def next_address(self) -> tuple[str, bool]:
        """Return whom to ask now, and whether all have been asked then."""
        if self._terms is None and self._next == 0:
            self._others = self._with_the_newest()
        _, address = self._others[self._next]
        self._next = (self._next + 1) % len(self._others)
        return address, self._next == 0

    def claim(self) -> Seat | None:
        """Claim the next term after all were asked; None where another one is to have the time to.

        Raises:
            Fenced: Others go on without this machine.
        """
        has_answered, self._has_answered = self._has_answered, False
        if self._terms is None or has_answered:
            return None
        later = self._terms.after(self._number)
        if self._terms.are_over:
            raise Fenced("the run has ended, or was begun again")
        if later is not None:
            if later.members.get(self._place.rank) != self.identity:
                raise Fenced(str(later))
            if later.node != self.server:  # it has just taken over, and is to be asked first
                self._lost_at, self._next = time.monotonic(), 0
                if later.address:
                    others = [each for each in self._others if each[0] != later.node]
                    self._others = [(later.node, later.address), *others]
            self._number, self.server = later.number, later.node
            return None
        if self.socket is None or time.monotonic() < self._lost_at + self._policy.candidate_s * self._before():
            return None
        newest = self._terms.after(self._number - 1)
        if newest is None:
            raise Fenced("the run has ended, or was begun again")
        members = {node: name for node, name in newest.members.items() if node != self.server}
        own: dict[str, Any] = {"node": self._place.rank, "address": self._place.endpoints[self._place.rank]}
        term = Term(number=newest.number + 1, name=host_name(), members=members, **own)
        try:
            return Seat(self._terms, term) if self._terms.claim(term) else None
        except FileNotFoundError:
            raise Fenced("the run has ended, or was begun again") from None
        except OSError as error:  # a folder that only this machine cannot write to: another one may take over
            log.warning("this machine, node %d, cannot take over: %s", self._place.rank, error)
            self.close()
            self.socket = None
            return None

    def _before(self) -> int:
        """Return how many machines that are there may serve before this one."""
        return sum(node in self.known.nodes and node not in (self.server,) for node in range(self._place.rank))
