"""The covering set that `composer3d selftest` runs: rows of the matrix of plugins on record, as manifests.

Rows are ordered so that those that hold the most pairs of options for their time, that no earlier row holds, come
first. Left out are rows that compile with inductor, for minutes of compilers.
`plugins/composer3d_plugins/covering_set.json` has them with the share of pairs that are held up to each; a package of
other plugins may ship such a file too.

Usage: python benchmarks/covering_set.py [--write]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from harness import say
from plugin_matrix import most_pairs_first, pairs_of, whole
from plugin_matrix_cells import manifest_of, num_ranks

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "plugin_matrix.json"
SHIPPED = HERE.parent / "plugins" / "composer3d_plugins" / "covering_set.json"
NUM_ROWS = 80


def rows() -> list[dict[str, Any]]:
    """Return the rows in their order, each with its manifest, ranks, seconds and the share of pairs held so far."""
    cells = [cell for cell in json.loads(RESULT.read_text())["cells"] if cell["outcome"] == "proven"]
    cells = [cell for cell in cells if cell["row"].get("scheduling.compile") != "on"]
    costs = {json.dumps(cell["row"]): cell["wall_s"] for cell in cells}
    total = len(set().union(*(pairs_of(cell["row"]) for cell in cells)))

    def cost(row: Mapping[str, str]) -> float:
        # Several ranks come first: one alone exchanges nothing.
        return costs[json.dumps(row)] / (1.0 if num_ranks(row) > 1 else 0.3)

    return [
        {
            "manifest": manifest_of(whole(row)),
            "ranks": num_ranks(row),
            "seconds": costs[json.dumps(row)],
            "pairs": round(num_held / total, 3),
        }
        for row, num_held in islice(most_pairs_first([cell["row"] for cell in cells], cost=cost), NUM_ROWS)
    ]


def main() -> int:
    """Print the set, or write it."""
    parser = argparse.ArgumentParser(description="Make the covering set of selftest.")
    parser.add_argument("--write", action="store_true", help="write it into the package")
    made = json.dumps(rows(), indent=0) + "\n"
    if parser.parse_args().write:
        SHIPPED.write_text(made)
    else:
        say(made.rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
