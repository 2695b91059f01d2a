"""The matrix of layouts: every data parallelism x tensor parallelism x schedule x number of micro-batches x cp.

A cell is two steps in float64 with clipping and momentum; losses, gradient norms, every gradient and the parameters
afterwards are compared with one device, relative to the largest value of each tensor. Every cell ends proven, or
refused for a reason on the list in `layout_matrix_cells.py`; anything else is a failure.

The whole matrix is written to benchmarks/results/layout_matrix.json, and its summary to benchmarks/README.md. Its
largest worlds have 16 ranks, which takes 6 GiB of memory. `matrix.py` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from harness import conditions, fail, note, say, with_marked
from layout_matrix_cells import OPTIONS, PERMITTED, Cell, Refusal, cells, covering, judge, one_device
from layout_matrix_progress import Progress, fingerprint, row_of
from layout_matrix_record import RECORD, Record, extend

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "layout_matrix.json"
PROGRESS = RESULT.with_suffix(".partial.jsonl")
README = ROOT / "benchmarks" / "README.md"
CELLS_A_WORLD = 6
MARKS = {"proven": "=", "refused": "-", "failed": "X"}


def groups(some: Iterable[Cell]) -> list[list[Cell]]:
    """Put cells together that share a world."""
    by_size: dict[int, list[Cell]] = {}
    for cell in some:
        by_size.setdefault(cell.world_size, []).append(cell)
    return [
        same[start : start + CELLS_A_WORLD]
        for _, same in sorted(by_size.items())
        for start in range(0, len(same), CELLS_A_WORLD)
    ]


def run(some: Sequence[Any], progress: Progress) -> list[dict[str, Any]]:
    """Judge those cells that have no verdict yet, writing verdicts down; return all rows in the order of the cells.

    Args:
        some: Cells of one matrix, all of one model.
        progress: Verdicts so far.
    """
    left = [cell for cell in some if str(cell) not in progress.rows]
    if len(left) < len(some):
        note(f"{len(some) - len(left)} of {len(some)} cells have their verdict already")
    reference = one_device(left[0].make) if left else {}
    for group in groups(left):
        started = time.monotonic()
        verdicts = judge(group, reference)
        progress.add([row_of(verdict) for verdict in verdicts], time.monotonic() - started)
        for verdict in verdicts:
            if verdict.outcome == "failed":
                note(f"{verdict.cell} failed: {verdict.detail}")
        note(f"{sum(str(cell) in progress.rows for cell in some)} of {len(some)} cells, {progress.wall_s:.0f} s")
    return [progress.rows[str(cell)] for cell in some]


def report(
    rows: Sequence[dict[str, Any]], stated: dict[str, Any], wall_s: float, permitted: Sequence[Refusal] = PERMITTED
) -> dict[str, Any]:
    """Return what `--json` prints."""
    largest: dict[str, float] = {}
    for row in rows:
        for kind, value in row["largest"].items():
            largest[kind] = max(largest.get(kind, 0.0), value)
    return {
        "summary": {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in MARKS},
        "refused": refused(rows),
        "permitted": [refusal.reason for refusal in permitted],
        "largest": largest,
        "conditions": stated,
        "wall_s": round(wall_s, 1),
        "cells": list(rows),
    }


def refused(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Count refusals by their reasons."""
    return Counter(row["detail"] for row in rows if row["outcome"] == "refused")


def summary(found: dict[str, Any]) -> str:
    """Return what benchmarks/README.md says of a whole run."""
    counts, stated = found["summary"], found["conditions"]
    refused = "; ".join(f"{number} for {reason}" for reason, number in sorted(found["refused"].items()))
    largest = ", ".join(f"{kind} {value:.1e}" for kind, value in found["largest"].items())
    return (
        f"Of {len(found['cells'])} layouts {counts['proven']} are proven, {counts['refused']} refused as they must be "
        f"({refused}), {counts['failed']} failed.\n"
        f"Largest relative differences from one device: {largest}.\n"
        f"Run on {stated['date']} in {found['wall_s'] / 60:.0f} minutes: {stated['machine']}; Python "
        f"{stated['python']}, torch {stated['torch']}.\n"
    )


def show(found: dict[str, Any]) -> None:
    """Print a table: a line a schedule and number of micro-batches, a column a data and tensor parallelism."""
    outcomes = {row["cell"]: MARKS[row["outcome"]] for row in found["cells"]}
    heads = [f"{data}/{tensor}" for data in OPTIONS["data"] for tensor in OPTIONS["tensor"]]
    say(" " * 36 + "  ".join(heads))
    for context, schedule, number in product(*(OPTIONS[name] for name in ("context", "schedule", "microbatches"))):
        line = f"{schedule}/{number}" if context == "cp1" else f"{schedule}/{number}/{context}"
        marks = [outcomes.get(f"{head}/{line}", ".") for head in heads]
        if set(marks) != {"."}:
            say(f"{line:<36}" + "  ".join(mark.center(len(head)) for mark, head in zip(marks, heads, strict=True)))
    say(", ".join(f"{number} {outcome} ({MARKS[outcome]})" for outcome, number in found["summary"].items()))
    say("largest differences: " + ", ".join(f"{kind} {value:.1e}" for kind, value in found["largest"].items()))
    for reason, number in found["refused"].items():
        say(f"refused: {number} for {reason}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what a command line says of this matrix."""
    parser.add_argument("--only", metavar="PATTERN", default="*", help="cells to run, as in 'zero3/tp2*/*/4P'")
    parser.add_argument("--pairwise", action="store_true", help="few cells, in which every two options stand together")
    parser.add_argument("--resume", action="store_true", help="go on with the verdicts that a whole run has left")
    parser.add_argument(
        "--record", type=float, metavar="MINUTES", help="prove cells with cp that are not on record yet, so long"
    )


def prove(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the cells that a command line asks for, and write down a whole run; return what `--json` prints."""
    if arguments.record is not None:
        record = Record(RECORD, stated={**conditions(), "code": fingerprint(ROOT)})
        failed = extend(record, seconds=60 * arguments.record)
        found = record.found()
        return {**found, "refused": refused(found["cells"]), "cells": [*found["cells"], *failed]} | (
            {"summary": {**found["summary"], "failed": len(failed)}}
        )
    some = [c for c in (covering() if arguments.pairwise else cells()) if fnmatchcase(str(c), arguments.only)]
    if not some:
        fail(f"no cell matches {arguments.only}; cells are like {next(cells())}")
    stated, is_whole = conditions(), len(some) == len(list(cells()))
    # A few cells alone do not end what a whole run has begun.
    path = PROGRESS if is_whole or arguments.resume else None
    progress = Progress(path, stated={**stated, "code": fingerprint(ROOT)}, resume=arguments.resume)
    rows = run(some, progress)
    found = report(rows, {**stated, "load_1min_after": round(os.getloadavg()[0], 2)}, progress.wall_s)
    if is_whole:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        README.write_text(with_marked(README.read_text(encoding="utf-8"), "layouts", summary(found)), encoding="utf-8")
        progress.close()
    return found
