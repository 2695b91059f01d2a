"""Host memory that a process keeps for its next tensors."""

from __future__ import annotations

import resource
import sys

import pytest

from composer3d.processes import Child, keep_freed_memory

_NUM_TENSORS, _NUM_ROUNDS = 4, 5
_NUM_PAGES = (64 << 20) // resource.getpagesize()


def _faults() -> dict[str, int]:
    """Return how many pages the system handed out for tensors of 64 MiB that are freed at once, kept and not."""
    found = {}
    for name in ("plain", "kept"):
        if name == "kept":
            keep_freed_memory()
        rounds = []  # until what is kept lies where the next tensor fits
        for _ in range(_NUM_ROUNDS):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            _make_tensors()
            rounds.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        found[name] = min(rounds)
    return found


def _make_tensors() -> None:
    import torch

    for _ in range(_NUM_TENSORS):
        torch.ones(8 << 20, dtype=torch.float64)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_kept_for_the_next_tensor() -> None:
    faults = Child(_faults).result()
    assert faults["kept"] < _NUM_PAGES / 10, faults
