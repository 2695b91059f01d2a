"""The verdicts of layouts that are being run, in a file, so that a run that was cut off can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import fail
from layout_matrix_cells import Verdict

__all__ = ["Progress", "fingerprint", "row_of"]

# What verdicts depend on besides the code; the day and the load are those of the part that ran last.
_SAME = ("code", "machine", "python", "torch")


def fingerprint(root: Path) -> str:
    """Return a hash of all code that verdicts depend on."""
    digest = hashlib.sha256()
    folders = [root / "composer3d", root / "plugins"]
    files = [path for folder in folders for path in folder.rglob("*.py")] + [
        root / "benchmarks" / "layout_matrix_cells.py"
    ]
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def row_of(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON values."""
    return {
        "cell": str(verdict.cell),
        "ranks": verdict.cell.world_size,
        "outcome": verdict.outcome,
        "detail": verdict.detail,
        "largest": {kind: float(f"{value:.3g}") for kind, value in verdict.largest.items()},
    }


class Progress:
    """Rows by cell, and the file in which they are kept: a line of conditions, then a line a world.

    Args:
        path: The file; without `resume` it is begun anew, and with it the file may be missing. None keeps nothing.
        stated: The conditions of this run.
        resume: Take over what the file holds. The line that was being written when a run was cut off is left out.
    """

    def __init__(self, path: Path | None, *, stated: dict[str, Any], resume: bool) -> None:
        self._path = path
        self.rows: dict[str, dict[str, Any]] = {}
        self.wall_s = 0.0
        stated = {key: stated[key] for key in _SAME}
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if resume and path and path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        if path is not None:
            path.write_text("".join(whole) or _line(stated), encoding="utf-8")
        if whole:
            before, *worlds = map(json.loads, whole)
            self._refuse_others(before, stated)
            for world in worlds:
                self._take(world)

    def _refuse_others(self, before: dict[str, Any], stated: dict[str, Any]) -> None:
        changed = [key for key in _SAME if before[key] != stated[key]]
        if changed:
            fail(
                f"{self._path} is of other conditions: "
                + ", ".join(f"{key} was {before[key]} and is {stated[key]}" for key in changed)
                + "; leave --resume out to begin anew"
            )

    def _take(self, world: dict[str, Any]) -> None:
        self.rows |= {row["cell"]: row for row in world["rows"]}
        self.wall_s += world["wall_s"]

    def add(self, rows: Sequence[dict[str, Any]], wall_s: float) -> None:
        """Write down the verdicts of one world, and the seconds that they took."""
        world = {"wall_s": round(wall_s, 1), "rows": list(rows)}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(world))
        self._take(world)

    def close(self) -> None:
        """Remove the file of a run that is complete."""
        if self._path is not None:
            self._path.unlink()


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"
