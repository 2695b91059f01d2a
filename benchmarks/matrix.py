"""The matrix: every layout, layouts with experts, and every two options of all installed plugins, beside one device.

The parts are run in turn, or the one that is named; each has its table in benchmarks/results/, and its summary in
README.md. The exit code is 1 if a cell failed, which is a defect.

Usage: python benchmarks/matrix.py [--json]
       python benchmarks/matrix.py layouts [--only 'zero3/*/1F1B/*'] [--pairwise] [--resume] [--record MINUTES] [--json]
       python benchmarks/matrix.py experts [--only '*ep4*'] [--resume] [--json]
       python benchmarks/matrix.py plugins [--plan] [--known] [--part K/N] [--cells N] [--only TEXT] [--again|--failed]
"""

from __future__ import annotations

import argparse
import json
import os
import sys

# Read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import expert_matrix
import layout_matrix
import plugin_matrix
from harness import say

MATRICES = {"layouts": layout_matrix, "experts": expert_matrix, "plugins": plugin_matrix}


def main() -> int:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description="Prove layouts and every two options of plugins beside one device.")
    parsers = {"": parser}
    chosen = parser.add_subparsers(dest="which", metavar="|".join(MATRICES), help="one alone; it has more options")
    for name, matrix in MATRICES.items():
        parsers[name] = chosen.add_parser(name, description=f"Prove {name} beside one device.")
        matrix.add_options(parsers[name])
    for name, each in parsers.items():
        # A word more on the line does not undo what stands before it.
        default = argparse.SUPPRESS if name else False
        each.add_argument("--json", action="store_true", default=default, help="print one JSON object")
    arguments = parser.parse_args()
    found = {}
    for name in [arguments.which] if arguments.which else MATRICES:
        found[name] = MATRICES[name].prove(arguments if arguments.which else parsers[name].parse_args([]))
        if not arguments.json:
            MATRICES[name].show(found[name])
    if arguments.json:
        say(json.dumps(found[arguments.which] if arguments.which else found, indent=1))
    return 1 if any(each["summary"]["failed"] or each.get("wrong") for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
