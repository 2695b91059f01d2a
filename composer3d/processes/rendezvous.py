"""Stores in which ranks meet, and the interfaces on which they listen.

On one machine nothing listens beyond loopback: ranks of the local launcher meet in a file of a private folder, and what
their backends open is bound to the loopback interface. On several machines the store listens on the address of
MASTER_ADDR alone.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from composer3d.errors import RendezvousError

__all__ = ["INTERFACES", "LAUNCH", "keep_to_loopback", "meeting_point", "private_attempt"]

LAUNCH = "COMPOSER3D_LAUNCH"  # the local launcher's private folder, in the environment of its ranks

_LOOPBACK = ("lo", "lo0")
INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}  # NCCL takes a prefix unless told otherwise


def private_attempt(run_id: str, restart: str) -> Path | None:
    """Return the folder of an attempt inside the local launcher's private folder; None under another launcher.

    Args:
        run_id: The launcher's name of the run.
        restart: How often it restarted the ranks.
    """
    private = os.environ.get(LAUNCH)
    folder = Path(private) / f"{run_id}-{restart}" if private else None
    # A launcher that a rank starts itself inherits the variable, and has another run's name.
    return folder if folder is not None and folder.is_dir() else None


def meeting_point(timeout: timedelta) -> dict[str, Any]:
    """Return the arguments with which this rank joins the default process group of its launcher.

    Args:
        timeout: Of the store.

    Raises:
        RendezvousError: This is rank 0, and MASTER_ADDR with MASTER_PORT is no address that it can listen on.

    Collectives: none.
    """
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = private_attempt(
        os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )
    if attempt is not None:
        # Neither names the number of ranks: the last of them would remove the file, under one that joins again.
        store = dist.FileStore(str(attempt / f"store-{_times_joined(attempt, rank)}"), -1)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return {"store": store, "rank": rank, "world_size": world_size}
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        return {}  # torch names what is missing
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _kept_store(os.getpid(), address, port, rank, world_size, timeout, is_agents)
    return {"store": _own_keys(store, rank), "rank": rank, "world_size": world_size}


def keep_to_loopback() -> Callable[[], None]:
    """Bind what backends of this process open to the loopback interface, where all ranks are on this machine.

    An interface that the environment names already is kept.

    Returns:
        A function that gives the environment back.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    is_one_machine = world_size == "1" or os.environ.get("LOCAL_WORLD_SIZE") == world_size
    name = next((name for _, name in socket.if_nameindex() if name in _LOOPBACK), None)
    if not is_one_machine or name is None:
        return lambda: None
    added = [variable for variable in INTERFACES if variable not in os.environ]
    os.environ.update({variable: INTERFACES[variable].format(name) for variable in added})

    def release() -> None:
        for variable in added:
            os.environ.pop(variable, None)

    return release


def _times_joined(attempt: Path, rank: int) -> int:
    """Return how often this rank has joined before, and note this time: every world has a store of its own."""
    for number in itertools.count():
        try:
            (attempt / f"joined-{number}-{rank}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    raise AssertionError


@functools.cache
def _kept_store(
    pid: int, address: str, port: str, rank: int, world_size: int, timeout: timedelta, is_agents: bool
) -> Any:
    """Return the store in which the launcher's ranks meet, the same one for every world that this process joins.

    One that rank 0 serves lives as long as its process: a rank that is quicker with its next world than rank 0 with the
    end of the last one would lose it.

    Args:
        pid: A forked process has connections of its own.
        address: Of whoever serves it.
        port: TCP port that it listens on.
        rank: Global rank that connects; 0 serves the store, unless the launcher does.
        world_size: Number of ranks.
        timeout: Of the store.
        is_agents: The launcher serves it, not rank 0.
    """
    import torch.distributed as dist

    if is_agents:
        return dist.TCPStore(address, int(port), world_size, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return _served_store(address, port, rank=rank, world_size=world_size, timeout=timeout)


def _own_keys(store: Any, rank: int) -> Any:
    """Return a view of a store that no world before has written to.

    torch numbers process groups from 0 in every world, and the addresses of the last one's ranks still stand under
    their keys: a rank that reads them before they are rewritten connects to no peer, and waits.
    """
    import torch.distributed as dist

    # The store counts, not the process: a launcher that starts ranks again begins with an empty one.
    number = store.add(f"composer3d/joined/{rank}", 1)
    return dist.PrefixStore(f"composer3d/world/{number}", store)  # type: ignore[attr-defined]


def _served_store(address: str, port: str, *, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return the store that rank 0 serves on one address of its machine; torch's own would listen on all of them."""
    import torch.distributed as dist

    listener = _listen(address, port) if rank == 0 else None
    return dist.TCPStore(  # type: ignore[attr-defined]  # documented, but not in the module's __all__
        address,
        int(port),
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(address: str, port: str) -> socket.socket | None:
    """Return a socket that listens on one address of this machine; None where this process does so already."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
        with ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(socket.SOMAXCONN)
            on_failure.pop_all()
            return listener
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return None  # a world before this one left its server, which torch goes on with; or torch says whose it is
        raise RendezvousError(
            f"MASTER_ADDR={address} MASTER_PORT={port}: rank 0 cannot listen there ({error}); give the address of rank "
            "0's machine by which the others reach it, and a free port"
        ) from error
