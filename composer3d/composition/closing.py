"""Closing of many resources: every one is closed whatever the others raise, and the run's own error stays first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

__all__ = ["close_all"]


def close_all(functions: Iterable[Callable[[], object]], *, error: BaseException | None = None) -> None:
    """Call every function, and raise the last error of those that failed.

    After a failure of the run theirs become notes on its error: a save in flight, say, fails because the same peer is
    missing, and its message would hide the one that names the peer.

    Args:
        functions: Called in this order.
        error: Error that ended the run, if one did.
    """
    try:
        with contextlib.ExitStack() as stack:
            for function in reversed([*functions]):
                stack.callback(function)
    except Exception as late:
        if error is None:
            raise
        error.add_note(f"closing failed too: {type(late).__name__}: {late}")
