"""A rank's connection to the membership server: one request at a time, notifications, and heartbeats.

Where several machines may serve, the rank goes through their addresses once the connection has ended or was silent,
until one serves; states what it was told last; and is told what became of the step in flight. A request that was not
answered is answered by that, or is made again.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer3d.errors import ReplicaError, StepError
from composer3d.replicas.endpoint import connect, local_host
from composer3d.replicas.rank_requests import RankRequests

__all__ = ["ADDRESS", "ATTEMPT", "GROUP", "TOKEN", "Quorum", "QuorumClient", "address_of_quorum"]

ADDRESS, TOKEN = "COMPOSER3D_QUORUM", "COMPOSER3D_QUORUM_TOKEN"
GROUP, ATTEMPT = "COMPOSER3D_REPLICA", "COMPOSER3D_REPLICA_ATTEMPT"
_CONNECT_S, _AGAIN_S = 2.0, 0.1  # limit of one try to reach a server, and time between two rounds of tries
_GONE = {"out": "the launcher that knows who takes part is gone"}


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """Members of a step.

    Args:
        epoch: Number of the epoch.
        members: Groups, ascending.
        step: Optimizer steps that the members have taken.
        source: Group that sends the state to those without it.
        behind: Groups without the state.
        stop: Whether some rank was requested to stop.
    """

    epoch: int
    members: tuple[int, ...]
    step: int
    source: int
    behind: tuple[int, ...]
    stop: bool


def address_of_quorum() -> str | None:
    """Return the server's address from the launcher's environment; None outside a replica group."""
    return os.environ.get(ADDRESS)


class QuorumClient:
    """Client of the launcher's membership server, which also sends heartbeats.

    Args:
        address: Path of a socket, or `host:port`; or several of these, separated by commas, of machines that may serve.
        group: Group of this rank.
        attempt: Number of earlier starts of the group.
        rank: Rank within its group.
        setup: Value that must be equal on all ranks of the run.
        token: Name of the run.
        beat_s: Seconds between heartbeats.
        broken: Called in a thread with the epoch of a lost group.
        patience_s: Seconds without an answer to heartbeats after which a server among several is lost.
        takeover_s: Seconds within which another one is to serve.

    Attributes:
        has_begun: Whether other groups train already and have the state.
        host: This machine's address on the way to the server; None where that is on this machine.

    Raises:
        ReplicaError: No server answers.
        StepError: The rank is refused.
    """

    def __init__(
        self,
        address: str,
        *,
        group: int,
        attempt: int,
        rank: int,
        setup: str,
        token: str,
        beat_s: float,
        broken: Callable[[int], None],
        patience_s: float = float("inf"),
        takeover_s: float = 0.0,
    ) -> None:
        self._addresses = address.split(",")  # the one whose server was lost last comes last
        self._is_several = len(self._addresses) > 1
        self._answers: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._writing, self._ended, self._broken = threading.Lock(), threading.Event(), broken
        self._patience_s, self._takeover_s, self._beat_s = patience_s, takeover_s, beat_s
        self._requests = RankRequests(group)
        self._heard = time.monotonic()
        self._greeting = {"do": "hello", "token": token, "group": group, "attempt": attempt, "rank": rank}
        self._greeting |= {"setup": setup} | ({"several": True} if self._is_several else {})
        try:
            self._socket = self._first()
        except OSError as error:
            raise ReplicaError(f"the launcher of the groups does not answer at {address}: {error}") from error
        self.host = local_host(self._socket)
        self._threads = [
            threading.Thread(target=self._listen, name="quorum", daemon=True),
            threading.Thread(target=self._beat, args=(beat_s,), name="quorum-beat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        answer = self._request(self._greeting)
        self.has_begun = bool(answer["has_begun"])

    # ---- requests ----------------------------------------------------------------------------------------------------

    def ask(self, step: int, *, stop: bool, admits: bool = True) -> Quorum | None:
        """Return the members of a step once all connected ranks have asked; None if this group is spare.

        Args:
            step: Next step; -1 without a state.
            stop: Whether this rank was requested to stop.
            admits: Whether groups without the state may join now.
        """
        found = self._request({"do": "ask", "step": step, "stop": stop, "admits": admits})
        if "spare" in found:
            return None
        return Quorum(
            epoch=found["epoch"],
            members=tuple(found["members"]),
            step=found["step"],
            source=found["source"],
            behind=tuple(found["behind"]),
            stop=found["stop"],
        )

    def vote(self, *, ok: bool) -> bool:
        """Return whether the step is committed, given whether this rank's exchange is complete."""
        return bool(self._request({"do": "vote", "ok": ok})["commit"])

    def set(self, epoch: int, key: str, value: str) -> None:
        """Store a value for the other ranks of an epoch."""
        self._write({"do": "set", "epoch": epoch, "key": key, "value": value})

    def get(self, epoch: int, key: str) -> str | None:
        """Return a value that another rank of an epoch stores; None if that rank may be lost."""
        value: str | None = self._request({"do": "get", "epoch": epoch, "key": key})["value"]
        return value

    def leave(self) -> None:
        """Report that this rank has reached the end of the run.

        Where another machine may have to serve, wait for the answer: the end of the run is known to who was told it.
        """
        if self._is_several:
            self._request({"do": "leave"})
        else:
            self._write({"do": "leave"})

    def close(self) -> None:
        """End the connection."""
        self._ended.set()
        self._hang_up()
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._writing:
            known = self._requests.make(message)
            if known is None:
                self._send(message)
        answer = known or self._answers.get()
        if "refused" in answer:
            raise StepError(f"this group is not let into the run: {answer['refused']}")
        if "out" in answer:
            self._answers.put(answer)  # for the next request
            raise ReplicaError(f"this group is out of the run: {answer['out']}")
        return answer

    def _write(self, message: Mapping[str, Any]) -> None:
        with self._writing:
            self._send(message)

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message, while others wait; of a connection that has ended, the other thread knows."""
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            pass

    # ---- the thread that listens -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            self._hear()
            if self._requests.is_out or self._ended.is_set() or not self._is_several or not self._go_on():
                break
        self._answers.put(_GONE)
        if not self._ended.is_set():
            self._broken(-1)

    def _hear(self) -> None:
        """Take messages until the connection ends."""
        with self._socket.makefile("rb") as lines:
            try:
                for line in lines:
                    self._heard = time.monotonic()
                    message = json.loads(line)
                    if "broken" in message:
                        self._broken(int(message["broken"]))
                    elif message.get("do") != "beat":
                        with self._writing:
                            self._requests.take(message)
                        self._answers.put(message)
                        if "out" in message:
                            self._broken(-1)
            except (OSError, ValueError):
                pass

    # ---- another server ----------------------------------------------------------------------------------------------

    def _first(self) -> socket.socket:
        """Return the first connection: to the only server, or to one of several that answers.

        Raises:
            OSError: There is none.
        """
        if not self._is_several:
            return connect(self._addresses[0])
        for connection in self._tries():
            connection.settimeout(None)
            return connection
        raise TimeoutError("none of them serves")

    def _tries(self) -> Iterator[socket.socket]:
        """Yield connections to those that may serve, one after another and again, until the time is over."""
        deadline = time.monotonic() + self._takeover_s
        error: OSError | None = None
        while not self._ended.is_set():
            for address in list(self._addresses):
                self._addresses.append(self._addresses.pop(0))  # one that serves from now on is asked last then
                try:
                    connection = connect(address, timeout_s=_CONNECT_S)
                except OSError as caught:
                    error = caught
                    continue
                connection.settimeout(_CONNECT_S)
                yield connection
            if time.monotonic() > deadline:
                break
            self._ended.wait(_AGAIN_S)
        if error is not None and not self._requests.has_greeted:
            raise error

    def _go_on(self) -> bool:
        """Find the machine that serves now, and learn what became of the step; return whether there is one."""
        self._hang_up()
        for connection in self._tries():
            if self._is_served(connection):
                return True
            connection.close()
        return False

    def _is_served(self, connection: socket.socket) -> bool:
        """Greet a server, wait until it knows what became of the step, and go on; return whether it lets this rank."""
        with self._writing:
            greeting = dict(self._greeting)
            if self._requests.has_greeted:
                greeting["standing"] = self._requests.standing.to_json()
        try:
            connection.sendall((json.dumps(greeting) + "\n").encode())
            found = next(each for each in _answers(connection, self._beat_s) if "wait" not in each)
        except (OSError, ValueError, StopIteration):
            return False
        if "elsewhere" in found:  # it has gone on without this group, or is lost itself and does not know it yet
            return False
        connection.settimeout(None)
        with self._writing:
            self._socket.close()
            self._socket, self.host, self._heard = connection, local_host(connection), time.monotonic()
            epoch, answer = self._requests.standing.epoch, self._requests.resume(found)
            if answer is None and self._requests.pending is not None:
                self._send(self._requests.pending)
        if answer is not None:
            self._answers.put(answer)
        self._broken(-1 if "out" in found else epoch)
        if self._ended.is_set():  # meanwhile
            self._hang_up()
        return True

    def _hang_up(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended already
            pass

    def _beat(self, seconds: float) -> None:
        looked = time.monotonic()
        while not self._ended.wait(seconds):
            now = time.monotonic()
            with self._writing:
                self._heard += max(0.0, now - looked - 2 * seconds)  # this process was paused itself
                self._send({"do": "beat"})
                if self._is_several and now - self._heard > self._patience_s:
                    self._heard = now
                    self._hang_up()
            looked = now


def _answers(connection: socket.socket, beat_s: float) -> Iterator[Mapping[str, Any]]:
    """Yield the messages of a server that has taken over, which come at least as often as heartbeats."""
    received = b""
    while True:
        data = connection.recv(1)
        if not data:
            return
        received += data
        if data == b"\n":
            yield json.loads(received)
            received = b""
            connection.settimeout(max(_CONNECT_S, 4 * beat_s))
