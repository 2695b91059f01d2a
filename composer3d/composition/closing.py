"""Closing many things: one that fails keeps none of the others from it, and hides nothing that ended the run before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

__all__ = ["close_all"]


def close_all(functions: Iterable[Callable[[], object]], *, error: BaseException | None = None) -> None:
    """Call every function, and raise what the last of them raised that failed.

    After a failure theirs is a note on it: a save in flight, say, fails for want of the same peer, and its words would
    stand for the ones that name who was missing.

    Args:
        functions: In the order of their calls.
        error: What ended the run; None where nothing did.
    """
    try:
        with contextlib.ExitStack() as stack:
            for function in reversed([*functions]):
                stack.callback(function)
    except Exception as late:
        if error is None:
            raise
        error.add_note(f"closing failed too: {type(late).__name__}: {late}")
