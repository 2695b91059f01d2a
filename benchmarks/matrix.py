"""The matrix: every data parallelism x tensor parallelism x schedule x number of micro-batches, beside one device.

A cell is two steps in float64 with clipping and momentum; losses, gradient norms, every gradient and the parameters
afterwards are compared with one device, relative to the largest value of each tensor. Every cell ends proven, or
refused for a reason on the list in `matrix_cells.py`; anything else is a failure, and the exit code is 1.

The whole matrix is written to benchmarks/results/matrix.json. Its largest worlds have 16 ranks, which takes 6 GiB of
memory; on 2 cores it takes about 40 minutes. `--pairwise` runs few cells, in which every two options stand together.

Usage: python benchmarks/matrix.py [--only 'zero3/*/1F1B/*'] [--pairwise] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from harness import conditions, note, say
from matrix_cells import OPTIONS, PERMITTED, Cell, Verdict, cells, covering, judge, one_device

RESULT = Path(__file__).resolve().parent / "results" / "matrix.json"
CELLS_A_WORLD = 6
MARKS = {"proven": "=", "refused": "-", "failed": "X"}


def groups(some: Sequence[Cell]) -> list[list[Cell]]:
    """Put cells together that share a world."""
    by_size: dict[int, list[Cell]] = {}
    for cell in some:
        by_size.setdefault(cell.world_size, []).append(cell)
    return [
        same[start : start + CELLS_A_WORLD]
        for _, same in sorted(by_size.items())
        for start in range(0, len(same), CELLS_A_WORLD)
    ]


def run(some: Sequence[Cell]) -> list[Verdict]:
    """Judge cells, saying how far it is; return verdicts in the order of the cells."""
    found: dict[Cell, Verdict] = {}
    reference, started = one_device(), time.monotonic()
    for group in groups(some):
        for verdict in judge(group, reference):
            found[verdict.cell] = verdict
            if verdict.outcome == "failed":
                note(f"{verdict.cell} failed: {verdict.detail}")
        note(f"{len(found)} of {len(some)} cells, {time.monotonic() - started:.0f} s")
    return [found[cell] for cell in some]


def report(verdicts: Sequence[Verdict], stated: dict[str, Any], wall_s: float) -> dict[str, Any]:
    """Return what `--json` prints."""
    largest: dict[str, float] = {}
    for verdict in verdicts:
        for kind, value in verdict.largest.items():
            largest[kind] = max(largest.get(kind, 0.0), value)
    return {
        "summary": {outcome: sum(verdict.outcome == outcome for verdict in verdicts) for outcome in MARKS},
        "refused": Counter(verdict.detail for verdict in verdicts if verdict.outcome == "refused"),
        "permitted": [refusal.reason for refusal in PERMITTED],
        "largest": largest,
        "conditions": {**stated, "load_1min_after": round(os.getloadavg()[0], 2)},
        "wall_s": round(wall_s, 1),
        "cells": [
            {
                "cell": str(verdict.cell),
                "ranks": verdict.cell.world_size,
                "outcome": verdict.outcome,
                "detail": verdict.detail,
                "largest": {kind: float(f"{value:.3g}") for kind, value in verdict.largest.items()},
            }
            for verdict in verdicts
        ],
    }


def show(verdicts: Sequence[Verdict], found: dict[str, Any]) -> None:
    """Print a table: a line a schedule and number of micro-batches, a column a data and tensor parallelism."""
    outcomes = {str(verdict.cell): MARKS[verdict.outcome] for verdict in verdicts}
    heads = [f"{data}/{tensor}" for data in OPTIONS["data"] for tensor in OPTIONS["tensor"]]
    say(" " * 28 + "  ".join(heads))
    for schedule in OPTIONS["schedule"]:
        for number in OPTIONS["microbatches"]:
            marks = (outcomes.get(f"{head}/{schedule}/{number}", ".").center(len(head)) for head in heads)
            say(f"{schedule + '/' + number:<28}" + "  ".join(marks))
    say(", ".join(f"{number} {outcome} ({MARKS[outcome]})" for outcome, number in found["summary"].items()))
    say("largest differences: " + ", ".join(f"{kind} {value:.1e}" for kind, value in found["largest"].items()))
    for reason, number in found["refused"].items():
        say(f"refused: {number} for {reason}")


def main() -> int:
    """Read the command line, run the cells, print."""
    parser = argparse.ArgumentParser(description="Compare every layout with one device.")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="cells to run, as in 'zero3/tp2*/*/4P'")
    parser.add_argument("--pairwise", action="store_true", help="few cells, in which every two options stand together")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    some = [c for c in (covering() if arguments.pairwise else cells()) if fnmatchcase(str(c), arguments.only)]
    if not some:
        parser.error(f"no cell matches {arguments.only}; cells are like {next(cells())}")
    stated, started = conditions(), time.monotonic()
    verdicts = run(some)
    found = report(verdicts, stated, time.monotonic() - started)
    text = json.dumps(found, indent=1)
    if len(some) == len(list(cells())):
        RESULT.write_text(text + "\n")
    if arguments.json:
        say(text)
    else:
        show(verdicts, found)
    return 1 if found["summary"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
