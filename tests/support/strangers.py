"""A process that is no rank, and connects to the ports on which ranks wait for each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import struct
from pathlib import Path

from support.sockets import listening_ports

NUMBERS = [struct.pack("<q", number) for number in range(64)]  # with which gloo's ranks say who they are
NONSENSE = [b"", b"abc", bytes(range(8)), bytes(range(1, 251)) * 300]


@contextlib.contextmanager
def stranger(folder: Path, messages, *, user=None):
    """Send messages to every port that a process opens which has named itself by a file in a folder, and stay.

    Args:
        folder: Has a file for each process, its number for a name.
        messages: One a connection.
        user: Whose process it is; default: the caller's.
    """
    context = multiprocessing.get_context("fork")
    stop, number = context.Event(), context.Value("i", 0)
    process = context.Process(target=_connect, args=(folder, messages, user, stop, number))
    process.start()
    try:
        yield number
    finally:
        stop.set()
        process.join()


def _connect(folder, messages, user, stop, number):
    seen, held = set(), []
    while not stop.is_set():
        for pid in os.listdir(folder):
            for port in listening_ports(pid) - seen:
                seen.add(port)
                number.value = len(seen)
                if user is not None:
                    os.seteuid(user)  # a socket is whose process made it
                for message in messages:
                    with contextlib.suppress(OSError):
                        held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                        held[-1].sendall(message)
                if user is not None:
                    os.seteuid(0)
