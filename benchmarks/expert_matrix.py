"""The matrix of experts: corners of five dimensions, and any two options of layouts with ep, beside one device.

A cell is two steps in float64 with clipping and momentum, as in the matrix of layouts; losses, gradient norms, every
gradient and the parameters afterwards are compared. `matrix.py experts` runs it, and a whole run is written to
benchmarks/results/expert_matrix.json.
"""

from __future__ import annotations

import argparse
import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from expert_matrix_cells import covering
from harness import conditions, fail, say
from layout_matrix import report, run
from layout_matrix_progress import Progress, fingerprint

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "expert_matrix.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what a command line says of this matrix."""
    parser.add_argument("--only", metavar="PATTERN", default="*", help="cells to run, as in '*ep4*/tp2/*'")
    parser.add_argument("--resume", action="store_true", help="go on with the verdicts that a run has left")


def prove(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the cells that a command line asks for, and write down a whole run; return what `--json` prints."""
    every = covering()
    some = [cell for cell in every if fnmatchcase(str(cell), arguments.only)]
    if not some:
        fail(f"no cell matches {arguments.only}; cells are like {every[0]}")
    stated = conditions()
    progress = Progress(
        RESULT.with_suffix(".partial.jsonl"), stated={**stated, "code": fingerprint(ROOT)}, resume=arguments.resume
    )
    rows = run(some, progress)
    found = report(rows, {**stated, "load_1min_after": round(os.getloadavg()[0], 2)}, progress.wall_s, permitted=())
    if len(some) == len(every):
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        progress.close()
    return found


def show(found: dict[str, Any]) -> None:
    """Print a line a cell that failed, and how many were proven."""
    for row in found["cells"]:
        if row["outcome"] != "proven":
            say(f"{row['cell']} {row['outcome']}: {row['detail']}")
    say(", ".join(f"{number} {outcome}" for outcome, number in found["summary"].items()))
    say("largest differences: " + ", ".join(f"{kind} {value:.1e}" for kind, value in found["largest"].items()))
