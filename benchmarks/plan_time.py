"""Seconds of `composer3d plan` for large models: Llama-3-70B on 512 ranks, and Llama-3-405B on 16384.

The whole process counts, imports included. Times are those that pass, so nothing else should run meanwhile; CPU time of
the process and of the one beside it is shown too. Both are also given as multiples of what `import torch` takes on the
same machine, and the multiple of the time that passes is what is limited, of the median of the rounds: 4 times and 9
times are 3 s and 8 s beyond `import torch` where that takes 1 s. Each round begins without traces of earlier ones, and
with the bytecode that an installation and an earlier call leave.
`again` is a plan for another network by the traces that the round has kept; it imports no torch, and may take the CPU
time of `import torch`.

Usage: python benchmarks/plan_time.py [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import child, children_cpu_s, conditions, import_torch_s, keep_bytecode, note, say_rows
from layout_time import MANIFEST, TIMEOUT_S

_OF_405B = {
    "pp = 4": "pp = 16",
    "dp_shard = 16": "dp_shard = 128",
    "dim = 8192": "dim = 16384",
    "num_layers = 80": "num_layers = 126",
    "num_heads = 64": "num_heads = 128",
    "global_batch = 512": "global_batch = 2048",
}
CASES: tuple[tuple[str, int, Mapping[str, str], float], ...] = (
    ("Llama-3-70B on 512 ranks", 512, {}, 4.0),
    ("Llama-3-405B on 16384 ranks", 16384, _OF_405B, 9.0),
)


def measure(num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each model."""
    keep_bytecode()
    rows, (torch_passed_s, torch_s) = [], import_torch_s(num_rounds, timeout_s=TIMEOUT_S)
    for name, world_size, changes, limit in CASES:
        text = MANIFEST
        for before, after in changes.items():
            assert text.count(f"\n{before}\n") == 1, before
            text = text.replace(f"\n{before}\n", f"\n{after}\n")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.toml"
            path.write_text(text)
            times, again = [], []
            for number in range(num_rounds):
                os.environ["COMPOSER3D_TRACES"] = f"{folder}/{number}"
                times.append(_planned(path, world_size))
                again.append(_planned(path, world_size, "--what-if", "network=0.5x"))
        seconds, cpu_s = (round(statistics.median(column), 2) for column in zip(*times, strict=True))
        again_s, again_cpu_s = (round(statistics.median(column), 2) for column in zip(*again, strict=True))
        slowest = round(max(passed for passed, _ in times), 2)
        rows.append(
            {
                "name": name,
                "seconds": seconds,
                "slowest_s": slowest,
                "passed_times_import_torch": round(seconds / torch_passed_s, 1),
                "cpu_s": cpu_s,
                "times_import_torch": round(cpu_s / torch_s, 1),
                "again_s": again_s,
                "again_cpu_s": again_cpu_s,
                "again_times_import_torch": round(again_cpu_s / torch_s, 1),
                "budget_times": limit,
            }
        )
        note(f"{name}: {seconds} s")
    return rows


def _planned(path: Path, world_size: int, *more: str) -> tuple[float, float]:
    """Return the seconds that pass and the CPU time of a plan."""
    started, cpu_started = time.monotonic(), children_cpu_s()
    options = ("--world-size", str(world_size), "--hardware", "h100", "--json", *more)
    told = json.loads(child(sys.executable, "-m", "composer3d", "plan", str(path), *options, timeout_s=TIMEOUT_S))
    assert told["world_size"] == world_size, "another world was planned"
    return time.monotonic() - started, children_cpu_s() - cpu_started


def main() -> int:
    """Read the command line, measure, print; 1 if a plan takes more times `import torch` than its limit."""
    parser = argparse.ArgumentParser(description="Time the plan of large models.")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each model (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    stated = conditions()
    rows = measure(arguments.rounds)
    say_rows(rows, stated, as_json=arguments.json)
    return (
        0
        if all(
            row["passed_times_import_torch"] <= row["budget_times"] and row["again_times_import_torch"] <= 1
            for row in rows
        )
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
