"""Causes of an out-of-memory failure: the peaks of all ranks, and the contents of a memory snapshot."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from composer3d.diagnostics.doctor.run_folder import Evidence

__all__ = ["tell_memory", "told_request"]


def tell_memory(evidence: Evidence, rank: int | None) -> tuple[str, ...]:
    """Say what the ranks held, and from a snapshot what for.

    Args:
        evidence: Of the run.
        rank: The one that ran out.
    """
    return (*_held(evidence), *_snapshot(evidence, rank))


def _held(evidence: Evidence) -> Iterable[str]:
    """Yield one line with the peaks of all ranks, which shows whether one needs more than the others."""
    peaks = {
        one.rank: one.memory.get("peak_device_bytes", one.memory["peak_resident_bytes"])
        for one in evidence.witnesses.values()
    }
    if peaks:
        shown = [f"rank {rank} {_size(peaks[rank])}" for rank in sorted(peaks, key=lambda r: -peaks[r])[:8]]
        kind = "device" if any("peak_device_bytes" in t.memory for t in evidence.witnesses.values()) else "resident"
        yield f"most {kind} memory that ranks held: {', '.join(shown)}"


def _snapshot(evidence: Evidence, rank: int | None) -> Iterable[str]:
    found = [
        (path, content)
        for path, content in evidence.snapshots.items()
        if content.get("rank") == rank and (content.get("error") is not None or not _of_exhaustion(evidence, rank))
    ]
    if not found:
        return
    path, content = max(found, key=lambda pair: int(pair[1]["step"]))
    parts = sorted(content["bytes"].items(), key=lambda pair: -pair[1])
    named = [f"{_size(size)} of {'other tensors' if name == 'other' else name}" for name, size in parts]
    yield f"it held {', '.join(named)} ({_below(path, evidence.run)})"
    others = [f"{row['tensor']} {_size(row['bytes'])}" for row in content["largest_others"][:3]]
    if others:
        yield f"largest other tensors: {', '.join(others)}"


def _of_exhaustion(evidence: Evidence, rank: int | None) -> bool:
    return any(c.get("rank") == rank and c.get("error") is not None for c in evidence.snapshots.values())


def _below(path: Path, run: Path) -> str:
    return str(path.relative_to(run))


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**28:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def told_request(message: str) -> str:
    """Return a clause on the size that an allocator's message states; empty where it states none.

    Args:
        message: Of the exception: CPU's allocator gives bytes, CUDA's a rounded size.
    """
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)", message)
    if found is None:
        return ""
    size = _size(int(found[1])) if found[2] == "bytes" else f"{found[1]} {found[2]}"
    return f", where it asked for {size} more"
