"""Addresses of a membership server: a socket's path on one machine, `HOST:PORT` between several."""

from __future__ import annotations

import ipaddress
import socket

from composer3d.errors import RendezvousError

__all__ = ["connect", "host_and_port", "listen", "local_host", "reserve"]

_MOST_PORT = 65535


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split `HOST:PORT`, where an IPv6 address stands in brackets.

    Raises:
        RendezvousError: It is none.

    >>> host_and_port("node0:29400"), host_and_port("[::1]:29400")
    (('node0', 29400), ('::1', 29400))
    """
    host, _, port = endpoint.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= _MOST_PORT
    if not host or not is_port or (":" in host) != is_bracketed or any(each.isspace() or each == "/" for each in host):
        raise RendezvousError(
            f'"{endpoint}" is no HOST:PORT; write the address of the first machine by which the others reach it, and a '
            "free port there: node0:29400, 10.0.0.5:29400 or [fd00::5]:29400"
        )
    return host, int(port)


def listen(endpoint: str, *, backlog: int) -> socket.socket:
    """Return a socket that listens at an endpoint of this machine, and on no other address of it.

    Args:
        endpoint: `HOST:PORT`.
        backlog: Number of connections that may wait.

    Raises:
        RendezvousError: As for `reserve`.
    """
    return _bound(endpoint, backlog=backlog, node=0)


def reserve(endpoint: str, *, node: int) -> socket.socket:
    """Return a socket that has an endpoint of this machine, and does not listen yet: who connects is refused.

    Args:
        endpoint: `HOST:PORT`.
        node: Number of this machine, for messages.

    Raises:
        RendezvousError: It is no address of this machine, its name stands for loopback, or its port is taken.
    """
    return _bound(endpoint, backlog=None, node=node)


def _bound(endpoint: str, *, backlog: int | None, node: int) -> socket.socket:
    host, port = host_and_port(endpoint)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        _refuse_loopback(endpoint, host, str(address[0]))
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a run before that has just ended
            listener.bind(address)
            if backlog is not None:
                listener.listen(backlog)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise RendezvousError(
            f"{endpoint}: node {node} cannot listen there ({error}); give the address of node {node}'s machine by "
            "which the others reach it, and a free port"
        ) from error
    return listener


def _refuse_loopback(endpoint: str, host: str, address: str) -> None:
    """Refuse a name that only this machine takes for its own: the others would not reach it.

    Raises:
        RendezvousError: Names the address.
    """
    if host == address or host.startswith("localhost") or not ipaddress.ip_address(address).is_loopback:
        return
    raise RendezvousError(
        f'{endpoint}: "{host}" is {address} on this machine, where no other one reaches it, as /etc/hosts says; '
        "give the address by which the others reach it, or mend that file"
    )


def connect(address: str, *, timeout_s: float | None = None) -> socket.socket:
    """Connect to a membership server.

    Args:
        address: Path of a socket, or `HOST:PORT`.
        timeout_s: Limit of a TCP connection's making, and no timeout of the connection.

    Raises:
        OSError: Nobody answers there.
    """
    if "/" in address:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            raise
        return connection
    connection = socket.create_connection(host_and_port(address), timeout=timeout_s)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def local_host(connection: socket.socket) -> str | None:
    """Return this machine's address on the way to the server; None where that is on one machine by its nature."""
    return None if connection.family == socket.AF_UNIX else str(connection.getsockname()[0])
