"""End of a rank whose collective received a message of another size: its main thread can raise nothing any more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["aborting", "end_rank"]

_aborts = False


@contextlib.contextmanager
def aborting() -> Iterator[None]:
    """Let ranks abort inside, where a launcher reports their place and what the others saw."""
    global _aborts
    outer, _aborts = _aborts, True
    try:
        yield
    finally:
        _aborts = outer


def end_rank(text: str) -> None:
    """End this process with exit code 1 and a message; return where it is to abort.

    Args:
        text: What every rank did.
    """
    if _aborts:
        return
    sys.stdout.flush()
    sys.stderr.write(f"composer3d.errors.StepError: {text}\n")
    sys.stderr.flush()
    os._exit(1)
