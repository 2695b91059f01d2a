"""Huge pages: what a fork copies of a process is its page table, 60,000 entries of small pages for torch alone."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["move_into_huge_pages"]

# Advice of Linux's madvise: use huge pages from now on, and (6.1) for what is there already.
_HUGEPAGE, _COLLAPSE = 14, 25
_SIZE = 1 << 21
_MAPS = Path("/proc/self/maps")


def move_into_huge_pages() -> None:
    """Move this process' own memory into pages of 2 MiB, so that ranks are forked, written to and ended in less time.

    Where a kernel cannot, nothing changes: forks are as slow as before. A second of CPU, once; on 2026-11-29 the ranks
    of `tests/step/test_loop_state.py` and its neighbour test_guard.py took 29 s of CPU before and 23 s after.
    """
    if not _MAPS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    for line in _MAPS.read_text().splitlines():
        addresses, access, *_, inode = line.split()[:5]
        path = line.split()[5:]
        if inode == "0" and access == "rw-p" and path in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _HUGEPAGE)
            first, last = -(-start // _SIZE) * _SIZE, end // _SIZE * _SIZE
            if first < last:
                advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE)
