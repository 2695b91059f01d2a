"""Seconds of `composer3d suggest` for Llama-3-70B on 64 H100, and what its first proposal needs by the plan.

The proposal is written as a manifest and planned by a process of its own: memory and time are the same, and it fits.
The whole process counts, imports included, with the bytecode that an installation leaves. CPU time is that of the
process and of the one beside it; both are also given as multiples of what `import torch` takes on the same machine.

Usage: python benchmarks/suggest_time.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import child, children_cpu_s, conditions, import_torch_s, keep_bytecode, say_rows
from layout_time import MANIFEST

WORLD_SIZE, TIMEOUT_S = 64, 3600.0
CHANGES = {"pp = 4": "pp = 1", "dp_shard = 16": "dp_shard = 8"}
GIB = 2**30


def measure() -> list[dict[str, Any]]:
    """Return the row: seconds, and the first proposal."""
    text = MANIFEST
    for before, after in CHANGES.items():
        assert text.count(f"\n{before}\n") == 1, before
        text = text.replace(f"\n{before}\n", f"\n{after}\n")
    os.environ["COMPOSER3D_TRACES"] = "off"  # of earlier runs
    keep_bytecode()
    torch_passed_s, torch_s = import_torch_s(3, timeout_s=TIMEOUT_S)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.toml"
        path.write_text(text)
        started, cpu_started = time.monotonic(), children_cpu_s()
        found = _composer3d("suggest", str(path), "--write", folder)
        seconds, cpu_s = time.monotonic() - started, children_cpu_s() - cpu_started
        planned = _composer3d("plan", str(Path(folder) / "suggestion-1.toml"))
    first = found["suggestions"][0]
    total = max(rank["memory"]["total"] for rank in planned["ranks"])
    assert total == first["memory"]["reserved"], "suggest and plan state the same memory"
    assert planned["time"]["step_s"] == first["time"]["step_s"], "and the same time"
    assert planned["verdict"] != "does not fit", "and the proposal fits"
    return [
        {
            "name": f"Llama-3-70B on {WORLD_SIZE} ranks",
            "seconds": round(seconds, 1),
            "passed_times_import_torch": round(seconds / torch_passed_s, 1),
            "cpu_s": round(cpu_s, 1),
            "times_import_torch": round(cpu_s / torch_s, 1),
            "proposals": len(found["suggestions"]),
            "first": first["layout"],
            "step_s": round(first["time"]["step_s"]["value"], 2),
            "device_gib": round(total / GIB, 1),
        }
    ]


def _composer3d(command: str, path: str, *options: str) -> Any:
    arguments = ("--world-size", str(WORLD_SIZE), "--hardware", "h100", "--json", *options)
    return json.loads(child(sys.executable, "-m", "composer3d", command, path, *arguments, timeout_s=TIMEOUT_S))


def main() -> int:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Time the suggestions for a large model.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    stated = conditions()
    say_rows(measure(), stated, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
