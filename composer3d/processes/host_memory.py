"""Host memory that a process keeps for its next tensors instead of giving it back."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

# Of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST, _LARGEST_ONCE = 1 << 30, 32 << 20  # the second is the most that older versions of glibc take
_MOST_KEPT = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what tensors on the CPU free; other allocators stay as they are.

    By default a tensor of more than 128 KiB is often memory that the system hands out, filled with zeros, and takes
    back: a process that computes little else spends most of its time in page faults.
    Memory: up to the process's peak, kept. Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(_M_MMAP_THRESHOLD, _LARGEST):
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_ONCE)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
