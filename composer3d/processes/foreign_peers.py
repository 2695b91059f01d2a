"""Connections of other users to the ports on which backends of process groups wait for ranks.

gloo and NCCL do not authenticate: who connects first with a number that a rank would send, and which can be guessed,
stands in that rank's place. The system knows who owns either end of a connection on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from composer3d.errors import RendezvousError

__all__ = ["refuse_foreign_peers"]

_ESTABLISHED, _LISTENING = "01", "0A"
_ROOT = "0"  # may read and write any process's memory anyhow


@contextmanager
def refuse_foreign_peers() -> Iterator[None]:
    """Refuse what was connected while process groups were made, where a process of another user is at the other end.

    Only ports that were opened meanwhile are looked at: a server of a plugin's is there for others. Where the system
    does not say who owns a connection (it is not Linux), nothing is refused.

    Raises:
        RendezvousError: Names the port and the user.
    """
    before = _own_ports()
    try:
        yield
    except Exception as error:  # whoever stands in a rank's place and says nothing is waited for until the timeout
        _refuse(before, error)
        raise
    _refuse(before, None)


def _refuse(before: Mapping[str, str], cause: Exception | None) -> None:
    opened = {address: owner for address, owner in _own_ports().items() if address not in before}
    for local, remote, state, owner, _ in _sockets() if opened else ():
        if state == _ESTABLISHED and owner not in (_ROOT, opened.get(remote, owner)):
            raise RendezvousError(
                f"a process of user {owner} (port {_port(local)}) is connected to port {_port(remote)}, on which this "
                "process waits for ranks; values from it could stand in a rank's place. End that process, or run where "
                "no other user has access"
            ) from cause


def _own_ports() -> dict[str, str]:
    """Return the addresses on which this process listens, as the system writes them, and their sockets' user."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # it was closed meanwhile
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            inodes.add(name.removeprefix("socket:[").removesuffix("]"))
    return {local: owner for local, _, state, owner, inode in _sockets() if state == _LISTENING and inode in inodes}


def _sockets() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield local and remote address, state, user and inode of every TCP socket in this network namespace."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, _, _, _, owner, _, inode = line.split()[:10]
            yield local, remote, state, owner, inode


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
