"""The commands as a user meets them: the quickstart, the first step of eight ranks, the check of a manifest.

quickstart, quickstart-3d: `composer3d run` of them, whole process: seconds, the last step's loss over the first's.
first step, 8 ranks: seconds from starting the command to the first step's row in metrics.jsonl.
check: CPU seconds of `composer3d check quickstart` beyond those of `import torch`, smallest of five runs each.

Usage: python benchmarks/quickstart.py [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import conditions, fail, note, say_rows

COMMAND = [sys.executable, "-m", "composer3d"]
TIMEOUT_S = 300.0


def whole_run(name: str, folder: Path) -> dict[str, Any]:
    """Run a shipped manifest to its end."""
    started = time.monotonic()
    command = [*COMMAND, "run", name, "--set", f"run.output={folder}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        fail(f"{' '.join(command)} ended with exit code {done.returncode}\n{done.stderr.rstrip()}")
    seconds = time.monotonic() - started
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[0]["loss"], rows[-1]["loss"]
    return {
        "name": name,
        "seconds": round(seconds, 1),
        "budget_s": 90.0,
        "steps": len(rows),
        "first_loss": round(first, 4),
        "last_loss": round(last, 4),
        "loss_ratio": round(last / first, 4),
        "evaluation_loss": round(rows[-1]["evaluation_loss"], 4),
    }


def first_step(folder: Path) -> dict[str, Any]:
    """Start the quickstart on eight ranks, wait for its first row, and stop it."""
    metrics = folder / "metrics.jsonl"
    overrides = {"mesh.dp_shard": "8", "train.microbatch": "2", "run.output": str(folder)}
    command = [*COMMAND, "run", "quickstart", *(f"--set={key}={value}" for key, value in overrides.items())]
    started = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        while not (metrics.exists() and metrics.stat().st_size):
            if run.poll() is not None or time.monotonic() - started > TIMEOUT_S:
                run.kill()
                fail(f"{' '.join(command)} made no step\n{run.communicate()[1].decode().rstrip()}")
            time.sleep(0.02)
        seconds = time.monotonic() - started
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=TIMEOUT_S)
    return {"name": "first step, 8 ranks", "seconds": round(seconds, 1), "budget_s": 10.0}


def check() -> dict[str, Any]:
    """Compare the check's CPU time with that of importing torch."""
    torch_s = min(cpu_seconds([sys.executable, "-c", "import torch"]) for _ in range(5))
    check_s = min(cpu_seconds([*COMMAND, "check", "quickstart"]) for _ in range(5))
    beyond = {"seconds": round(check_s - torch_s, 2), "budget_s": 1.0, "import_torch_s": round(torch_s, 2)}
    return {"name": "check, CPU beyond import torch", **beyond}


def cpu_seconds(command: list[str]) -> float:
    """Return the CPU seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=TIMEOUT_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Time the commands as a user meets them.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = conditions()
    rows = [check()]
    with tempfile.TemporaryDirectory() as folder:
        measures = (first_step, partial(whole_run, "quickstart"), partial(whole_run, "quickstart-3d"))
        for number, measure in enumerate(measures):
            rows.append(measure(Path(folder) / str(number)))
            note(f"{rows[-1]['name']}: {rows[-1]['seconds']} s")
    say_rows(rows, found, as_json=arguments.json)


if __name__ == "__main__":
    main()
