"""End of ranks whose collective failed, under a launcher: a notice that one looks for the cause, or an abort.

The main thread of a rank whose collective received a message of another size can raise nothing any more.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from composer3d.processes import flush_output

__all__ = ["aborting", "end_rank", "notice"]

_aborts: Callable[[], object] | None = None


@contextlib.contextmanager
def aborting(noticed: Callable[[], object]) -> Iterator[None]:
    """Let ranks abort inside, where a launcher reports their place and what the others saw.

    Args:
        noticed: Called when a collective has failed and this rank looks for the cause, which it is going to report.
    """
    global _aborts
    outer, _aborts = _aborts, noticed
    try:
        yield
    finally:
        _aborts = outer


def notice() -> None:
    """Let the launcher know that this rank is going to report why a collective failed."""
    if _aborts is not None:
        _aborts()


def end_rank(text: str) -> None:
    """End this process with exit code 1 and a message; return where it is to abort.

    Args:
        text: What every rank did.
    """
    if _aborts is not None:
        return
    flush_output()
    with contextlib.suppress(OSError, ValueError):  # the rank ends all the same, for others wait for it
        if sys.stderr is not None:
            sys.stderr.write(f"composer3d.errors.StepError: {text}\n")
            sys.stderr.flush()
    os._exit(1)
