"""The record of layouts with a sharded sequence: verdicts that are added a world at a time, over several runs.

All of them take hours of two cores, so that a run proves what is not on record yet, in an order that has every option
early, and writes each world's verdicts down as it has them. Every row says of which run it is.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import note
from layout_matrix_cells import Cell, cells, judge, one_device, warm
from layout_matrix_progress import row_of

__all__ = ["RECORD", "Record", "extend"]

RECORD = Path(__file__).resolve().parent / "results" / "layout_matrix_cp.json"
# Of a world: forking, importing and the first composition are paid once for all of its cells.
CELLS_A_WORLD = 12


class Record:
    """Verdicts on layouts with cp above 1, and the conditions of the runs that found them.

    Args:
        path: The file, which need not be there.
        stated: The conditions of this run.
    """

    def __init__(self, path: Path, *, stated: dict[str, Any]) -> None:
        self._path = path
        held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": [], "cells": []}
        self.runs: list[dict[str, Any]] = held["runs"]
        self.rows: list[dict[str, Any]] = held["cells"]
        self._this = {**stated, "wall_s": 0.0}

    def left(self) -> list[Cell]:
        """Return the cells that have no verdict, in an order of no pattern that is the same in every run."""
        known = {row["cell"] for row in self.rows}
        some = [cell for cell in cells() if cell.context != "cp1"]
        random.Random(0).shuffle(some)
        return [cell for cell in some if str(cell) not in known]

    def add(self, rows: Sequence[dict[str, Any]], wall_s: float) -> None:
        """Write down the verdicts of one world, and the seconds that they took; what failed is left for a next run."""
        proven = [row for row in rows if row["outcome"] != "failed"]
        if not proven:
            return
        if self._this not in self.runs:
            self.runs.append(self._this)
        self._this["wall_s"] = round(self._this["wall_s"] + wall_s, 1)
        self.rows += [{**row, "run": self.runs.index(self._this)} for row in proven]
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.found(), indent=1) + "\n", encoding="utf-8")
        partial.replace(self._path)

    def found(self) -> dict[str, Any]:
        """Return what the file holds."""
        largest: dict[str, float] = {}
        for row in self.rows:
            for kind, value in row["largest"].items():
                largest[kind] = max(largest.get(kind, 0.0), value)
        outcomes = ("proven", "refused", "failed")
        return {
            "summary": {outcome: sum(row["outcome"] == outcome for row in self.rows) for outcome in outcomes},
            "of": sum(cell.context != "cp1" for cell in cells()),
            "largest": largest,
            "runs": self.runs,
            "cells": sorted(self.rows, key=lambda row: row["cell"]),
        }


def extend(record: Record, *, seconds: float) -> list[dict[str, Any]]:
    """Judge cells that are not on record, worlds of few ranks and of many in turn; return the rows that failed.

    Args:
        record: Is written after every world.
        seconds: After which no other world is begun.
    """
    left, failed, end = record.left(), [], time.monotonic() + seconds
    reference = one_device() if left else {}
    while left and time.monotonic() < end:
        group = [cell for cell in left if cell.world_size == left[0].world_size][:CELLS_A_WORLD]
        left = [cell for cell in left if cell not in group]
        started = time.monotonic()
        warm(group[0])
        rows = [row_of(verdict) for verdict in judge(group, reference)]
        record.add(rows, time.monotonic() - started)
        failed += [row for row in rows if row["outcome"] == "failed"]
        for row in failed[-len(rows) :]:
            note(f"{row['cell']} failed: {row['detail']}")
        note(f"{len(record.rows)} on record, {len(left)} left, {time.monotonic() - started:.0f} s for {len(group)}")
    return failed
