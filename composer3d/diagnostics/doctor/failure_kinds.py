"""Failure kinds, by the type and the message of an exception."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["Kind", "kind_of"]

Kind = Literal[
    "killed",
    "aborted",
    "left",
    "data",
    "missing",
    "other_collective",
    "shapes",
    "out_of_memory",
    "disk_full",
    "machine",
    "not_finite",
    "straggler",
    "crash",
    "user",
    "lost",
    "running",
    "ended",
    "damaged",
    "vanished",
]

_MEMORY = re.compile(
    r"DefaultCPUAllocator|out of memory|cannot allocate memory|bad_alloc|std::bad_alloc", re.IGNORECASE
)
_DISK = re.compile(r"No space left on device|File too large|Disk quota exceeded", re.IGNORECASE)
_SHAPES = re.compile(r"Detected mismatch between collectives")


def kind_of(report: Mapping[str, Any]) -> Kind | None:
    """Return the kind of one rank's failure; None for one that lost a peer and has no failure of its own.

    Args:
        report: As `error.json` has it.
    """
    text = f"{report['error']}: {report['message']}"
    if report["error"] == "StabilityError" and "not finite" in text:
        return "not_finite"
    if report["error"] in ("OutOfMemoryError", "MemoryError") or (report["kind"] == "crash" and _MEMORY.search(text)):
        return "out_of_memory"
    if _DISK.search(text):
        return "disk_full"
    if report["kind"] == "machine":
        return "machine"
    if _SHAPES.search(text):
        return "shapes"
    if report["consequence"]:
        return None
    if report["kind"] == "killed":
        return "aborted" if report["exit_code"] == -6 else "killed"
    if report["kind"] in ("user", "left", "crash"):
        kind: Kind = report["kind"]
        return kind
    return "lost"
