"""Process groups over equal ranks of different replica groups, created for every epoch and abortable.

They use gloo and are not registered with torch: messages between groups pass through host memory. gloo's own
`abort` and `shutdown` do not end a collective that waits for a peer that was stopped; shutting down the connections
does, from any thread. Addresses are exchanged through the membership's own connection, so that nothing else listens.
Between several machines they listen on the address by which their rank reaches the membership server, and on no other.
"""

from __future__ import annotations

import base64
import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import gloo_at

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.replicas.quorum_client import QuorumClient

__all__ = ["Exchange", "ExchangeError"]


class ExchangeError(Exception):
    """A member of the epoch was lost during an exchange."""


class Exchange:
    """Collectives between equal ranks of all groups of an epoch.

    Args:
        rank: Rank within its group.
        timeout_s: Timeout of a collective.

    Memory: gloo's buffers. Collectives: those that are called.
    """

    def __init__(self, *, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout = rank, timedelta(seconds=timeout_s)
        self._guard = threading.Lock()
        self._group: Any = None
        self._before: frozenset[str] | None = None  # connections of others, while this one's are being made
        self._own: frozenset[str] = frozenset()
        self._epoch, self._ended = -1, -1
        self.size = 1

    def open(self, client: QuorumClient, epoch: int, *, group: int, members: Sequence[int]) -> None:
        """Connect to the other groups of an epoch.

        Args:
            client: Connection over which addresses are exchanged.
            epoch: Number of the epoch.
            group: Group of this rank.
            members: All groups of the epoch, ascending.

        Raises:
            ExchangeError: One of them is gone.
        """
        import torch.distributed as dist

        self.close()
        with self._guard:
            self._epoch, self._before = epoch, _connections()
            if self._ended >= epoch:
                raise ExchangeError("a group left before it was connected")
        self.size = len(members)
        if self.size == 1:
            return
        store = _store(client, epoch, f"{self._rank}/")
        try:
            if client.host is None:
                self._group = dist.ProcessGroupGloo(store, members.index(group), self.size, self._timeout)
            else:
                self._group = gloo_at(client.host, store, members.index(group), self.size, timeout=self._timeout)
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error
        finally:
            with self._guard:
                self._own = _connections() - (self._before or frozenset())
                self._before = None

    def end(self, epoch: int) -> None:
        """Abort the collectives of an epoch, from any thread; -1 for any epoch."""
        with self._guard:
            self._ended = max(self._ended, self._epoch if epoch == -1 else epoch)
            if epoch in (self._epoch, -1):
                _shut_down(self._own if self._before is None else _connections() - self._before)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor on the CPU over the groups.

        Raises:
            ExchangeError: One of them is gone.
        """

        if self.size > 1:
            self._wait(lambda: self._group.allreduce([tensor]))

    def send(self, tensor: Tensor, place: int) -> None:
        """Send a tensor on the CPU to the rank of a place among the members."""
        self._wait(lambda: self._group.send([tensor], place, 0))

    def receive(self, tensor: Tensor, place: int) -> None:
        """Receive what `send` sends."""
        self._wait(lambda: self._group.recv([tensor], place, 0))

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error

    def close(self) -> None:
        """Close the connections, if there are any."""
        with self._guard:
            group, self._group, self._own, self.size = self._group, None, frozenset(), 1
        del group  # its destructor ends gloo's threads


def _store(client: QuorumClient, epoch: int, prefix: str) -> Any:
    """Return a store of torch's over the membership's connection, for the addresses of one epoch."""
    import torch.distributed as dist

    class Addresses(dist.Store):  # type: ignore[name-defined]  # documented, but not in the module's __all__
        def set(self, key: str, value: Any) -> None:
            data = value.encode() if isinstance(value, str) else bytes(value)
            client.set(epoch, prefix + key, base64.b64encode(data).decode())

        def get(self, key: str) -> bytes:
            found = client.get(epoch, prefix + key)
            if found is None:
                raise RuntimeError("a group left before it was connected")
            return base64.b64decode(found, validate=True)

        def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
            for key in keys:
                self.get(key)

    return Addresses()


def _connections() -> frozenset[str]:
    """Return this process's sockets as `descriptor inode`: a number may be used again for another one."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # closed meanwhile, as is the folder's own
            continue
        if target.startswith("socket:"):
            found.add(f"{name} {target}")
    return frozenset(found)


def _shut_down(connections: frozenset[str]) -> None:
    """Shut down connected sockets; gloo ends the process where its listener is shut down, so that is left alone."""
    for connection in connections & _connections():
        try:
            with socket.socket(fileno=os.dup(int(connection.partition(" ")[0]))) as copy:
                copy.getpeername()
                copy.shutdown(socket.SHUT_RDWR)
        except OSError:  # a listener, or closed meanwhile
            continue
