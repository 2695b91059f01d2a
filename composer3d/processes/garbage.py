"""Garbage collection that scans new objects only."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["scanning_new_objects_only"]


@contextmanager
def scanning_new_objects_only() -> Iterator[None]:
    """Collect once, and leave what is alive then out of later collections and of those in forked processes.

    With torch and its lazy modules imported, a full collection scans 330,000 objects. At the end all objects
    are scanned again, but for a process that had frozen objects before: it can be given no part of them back.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
