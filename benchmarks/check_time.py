"""CPU time of `composer3d check` on every shipped manifest, above that of `import torch`.

Each round starts every command once, and a Python that only imports torch; the figure is the difference of medians of
user and system time, which other processes on the machine disturb less than they disturb wall time.

Usage: python benchmarks/check_time.py [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from harness import conditions, fail, say

from composer3d.manifest import shipped

BUDGET_S = 1.0


def cpu_time_s(command: list[str]) -> float:
    """Run a command and return the user and system time that it took, in seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        fail(f"{' '.join(command)} ended with exit code {process.returncode}:\n{told}")
    return usage.ru_utime + usage.ru_stime


def measure(num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each shipped manifest."""
    commands = {name: [sys.executable, "-m", "composer3d", "check", name] for name in shipped()}
    commands["import torch"] = [sys.executable, "-c", "import torch"]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(num_rounds + 1):
        for name, command in commands.items():
            times[name].append(cpu_time_s(command))
    # The first round fills the caches of the disk.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    torch_s = medians.pop("import torch")
    return [
        {
            "name": name,
            "check_s": round(check_s, 3),
            "import_torch_s": round(torch_s, 3),
            "above_s": round(check_s - torch_s, 3),
            "budget_s": BUDGET_S,
        }
        for name, check_s in medians.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    stated = conditions()
    rows = measure(arguments.rounds)
    if arguments.json:
        say(json.dumps({"conditions": stated, "rows": rows}, indent=1))
    else:
        for row in rows:
            say(f"{row['name']:<24} {row['above_s']:.2f} s above import torch ({row['import_torch_s']:.2f} s)")
    return 0 if all(row["check_s"] - row["import_torch_s"] <= BUDGET_S for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
