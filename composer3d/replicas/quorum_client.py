"""A rank's connection to the membership server: one request at a time, notifications, and heartbeats."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer3d.errors import ReplicaError, StepError
from composer3d.replicas.endpoint import connect, local_host

__all__ = ["ADDRESS", "ATTEMPT", "GROUP", "TOKEN", "Quorum", "QuorumClient", "address_of_quorum"]

ADDRESS, TOKEN = "COMPOSER3D_QUORUM", "COMPOSER3D_QUORUM_TOKEN"
GROUP, ATTEMPT = "COMPOSER3D_REPLICA", "COMPOSER3D_REPLICA_ATTEMPT"


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
        address: Path of a socket, or `host:port`.
        group: Group of this rank.
        attempt: Number of earlier starts of the group.
        rank: Rank within its group.
        setup: Value that must be equal on all ranks of the run.
        token: Name of the run.
        beat_s: Seconds between heartbeats.
        broken: Called in a thread with the epoch of a lost group.

    Attributes:
        has_begun: Whether other groups train already and have the state.
        host: This machine's address on the way to the server; None where that is on this machine.

    Raises:
        ReplicaError: The server does not answer.
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
    ) -> None:
        self._answers: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._writing, self._ended, self._broken = threading.Lock(), threading.Event(), broken
        try:
            self._socket = connect(address)
        except OSError as error:
            raise ReplicaError(f"the launcher of the groups does not answer at {address}: {error}") from error
        self.host = local_host(self._socket)
        self._threads = [
            threading.Thread(target=self._listen, name="quorum", daemon=True),
            threading.Thread(target=self._beat, args=(beat_s,), name="quorum-beat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        greeting = {"do": "hello", "token": token, "group": group, "attempt": attempt, "rank": rank, "setup": setup}
        self.has_begun = bool(self._request(greeting)["has_begun"])

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
        """Report that this rank has reached the end of the run."""
        self._write({"do": "leave"})

    def close(self) -> None:
        """End the connection."""
        self._ended.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended already
            pass
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        self._write(message)
        answer = self._answers.get()
        if "refused" in answer:
            raise StepError(f"this group is not let into the run: {answer['refused']}")
        if "out" in answer:
            self._answers.put(answer)  # for the next request
            raise ReplicaError(f"this group is out of the run: {answer['out']}")
        return answer

    def _write(self, message: Mapping[str, Any]) -> None:
        data = (json.dumps(message) + "\n").encode()
        try:
            with self._writing:
                self._socket.sendall(data)
        except OSError:  # the answers hold the reason of the disconnect
            pass

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines:
            try:
                for line in lines:
                    message = json.loads(line)
                    if "broken" in message:
                        self._broken(int(message["broken"]))
                        continue
                    self._answers.put(message)
                    if "out" in message:
                        self._broken(-1)
            except (OSError, ValueError):
                pass
        self._answers.put({"out": "the launcher that knows who takes part is gone"})
        if not self._ended.is_set():
            self._broken(-1)

    def _beat(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            self._write({"do": "beat"})
