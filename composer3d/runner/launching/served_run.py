"""A run that a machine serves already: who that is, for one that is started with an address that it has left."""

from __future__ import annotations

from pathlib import Path

from composer3d.errors import PlaceError
from composer3d.replicas import connect
from composer3d.runner.launching.node_place import NodePlace
from composer3d.runner.launching.terms import newest_term

__all__ = ["listens", "refuse_served"]

_LOOK_S = 1.0  # for an answer


def listens(endpoint: str) -> bool:
    """Return whether somebody listens at an endpoint."""
    try:
        connect(endpoint, timeout_s=_LOOK_S).close()
    except OSError:
        return False
    return True


def refuse_served(place: NodePlace, output: Path) -> None:
    """Refuse a machine that knows one address, where the machine of another one serves the run.

    Args:
        place: Of this machine.
        output: The run's folder.

    Raises:
        PlaceError: Says who serves, and where.
    """
    term = None if place.may_move else newest_term(output)
    if term is None or term.address in ("", place.endpoint) or not listens(term.address):
        return
    raise PlaceError(
        f"--endpoint {place.endpoint}: {term}, at {term.address}; give this machine the list of addresses that the "
        "others have, in the order of their numbers"
    )
