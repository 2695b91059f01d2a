"""Errors of a rank whose peer is gone or late: such a rank did not start the failure."""

from __future__ import annotations

__all__ = ["chain_of", "lost_a_peer"]

# Messages of torch's backends for a lost or late peer; a rank that raises one did not start the failure.
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "failed to recv, got 0 bytes",
    "socket timeout",
    "timed out waiting",
    "wait timeout",
    "remote process exited",
    "communicator was aborted",
    "application timeout caused pair closure",
    "watchdog caught collective operation timeout",
)


def lost_a_peer(error: BaseException) -> bool:
    """Return whether the origin of an exception is torch's error for a lost or late rank."""
    first = chain_of(error)[-1]
    return isinstance(first, RuntimeError) and any(sign in str(first).lower() for sign in _LOST)


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an exception and its causes, the origin last: stages wrap exceptions raised inside of them."""
    chain = [error]
    while True:
        before = chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)
        if before is None or before in chain:
            return chain
        chain.append(before)
