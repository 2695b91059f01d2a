"""Metrics as a table of comma-separated values."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from composer3d import RunContext, hookimpl, plugin

__all__ = ["CSV"]


@plugin(family="profiling")
class CSV:
    """Write every metric of every step as a row of a CSV file, a column a metric.

    A metric that appears later, as those of an evaluation do, becomes a further column, and the file is written again
    with it; rows of a resumed run take the place of those of the same steps. Floats have the digits that read back as
    the same float.

    Memory: the names of the columns.
    Collectives: none; the first rank writes.

    Args:
        file: In the run's folder, unless it is an absolute path.
    """

    file: str = Field(default="metrics.csv", min_length=1)

    @hookimpl
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step's row."""
        if context.rank != 0 or context.purpose != "run":
            return
        path = context.output / self.file
        if self not in context.state:
            context.state[self] = _resumed(path, step)
        row, columns = {"step": step, **metrics}, context.state[self]
        if added := [name for name in row if name not in columns]:
            columns += added
            _rewrite(path, columns, _rows(path))
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, columns, restval="").writerow(row)


def _resumed(path: Path, step: int) -> list[str]:
    """Drop the rows of steps that are repeated, and return the columns of a file that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = _rows(path)
    columns = list(rows[0]) if rows else []
    if rows:
        _rewrite(path, columns, [row for row in rows if int(row["step"]) < step])
    return columns


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, none where there is none; a last one that a kill left half written is dropped."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def _rewrite(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(beside, path)
