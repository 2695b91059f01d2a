"""Step time, CPU time and memory of composer3d against FSDP2 written by hand, on the same model and data.

`loops/one_device.py` is a training loop for one device, `loops/embedded.py` the same with composer3d, and
`loops/handwritten_fsdp2.py` the same with FSDP2 written by hand. Both run on 2 ranks in fresh processes, alternately:
hand-written, composer3d, hand-written, ..., hand-written.

ratio: every run of composer3d over the geometric mean of the two hand-written runs beside it, so that a machine that
    becomes slower or faster cancels; of a run the median step counts, and of the rounds the median ratio.
control: the same with a hand-written run in the place of composer3d's (A/A). Its ratios are above and below 1; control
    is their typical distance from 1: the median of max(r, 1/r). What lies within it cannot be told from no difference.
cpu_ratio: as ratio, of process CPU time a step.
rss_ratio: as ratio, of the peak of resident memory.
loss_abs: the largest difference, over all steps and rounds, between composer3d's loss, which is that of the global
    batch, and the mean of the hand-written ranks' losses.
lines: lines of the one-device loop added or changed to embed composer3d, by `git diff --no-index --numstat`.

With the defaults it takes about 6 minutes on 2 cores. Usage: python benchmarks/step_time.py [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import conditions, fail, note, run_world, say

LOOPS = Path(__file__).resolve().parent / "loops"
NUM_RANKS, NUM_WARMUP = 2, 3
RUN_TIMEOUT_S = 300.0


def measure(loop: str, steps: int) -> dict[str, Any]:
    """Run one loop once."""
    ranks = run_world(LOOPS / f"{loop}.py", str(steps), num_ranks=NUM_RANKS, timeout_s=RUN_TIMEOUT_S)
    return {
        "step_s": statistics.mean(statistics.median(rank["step_s"][NUM_WARMUP:]) for rank in ranks),
        "cpu_s": statistics.mean(statistics.median(rank["cpu_s"][NUM_WARMUP:]) for rank in ranks),
        "rss_bytes": statistics.mean(rank["peak_rss_bytes"] for rank in ranks),
        "losses": [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)],
    }


def ratios(middle: Sequence[dict[str, Any]], around: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Return each run over the geometric mean of the run before and the one after."""
    beside = zip(around[:-1], around[1:], strict=True)
    return [run[key] / math.sqrt(before[key] * after[key]) for run, (before, after) in zip(middle, beside, strict=True)]


def control(hand: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Return each hand-written run but the outermost over the geometric mean of those before and after it."""
    return [
        run[key] / math.sqrt(before[key] * after[key])
        for before, run, after in zip(hand, hand[1:], hand[2:], strict=False)
    ]


def lines_changed() -> int:
    """Count the lines of the one-device loop that embedding adds or changes; a changed line is added and deleted."""
    command = ["git", "diff", "--no-index", "--numstat", "one_device.py", "embedded.py"]
    done = subprocess.run(command, cwd=LOOPS, capture_output=True, text=True)
    if done.returncode != 1 or not done.stdout:
        fail(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr.rstrip()}")
    added, deleted = done.stdout.split()[:2]
    return max(int(added), int(deleted))


def run(rounds: int, steps: int) -> dict[str, Any]:
    """Measure, and return what `--json` prints."""
    found = conditions()
    started = time.monotonic()
    hand, composed = [measure("handwritten_fsdp2", steps)], []
    for number in range(1, rounds + 1):
        composed.append(measure("embedded", steps))
        hand.append(measure("handwritten_fsdp2", steps))
        ratio = ratios(composed[-1:], hand[-2:], "step_s")[0]
        note(f"round {number} of {rounds}: {ratio:.4f}, {time.monotonic() - started:.0f} s")
    step_ratios, controls = ratios(composed, hand, "step_s"), control(hand, "step_s")
    reference = statistics.mean
    row = {
        "name": "fsdp2, small Llama, 2 ranks",
        "ratio": statistics.median(step_ratios),
        "control": statistics.median(max(r, 1 / r) for r in controls),
        "cpu_ratio": statistics.median(ratios(composed, hand, "cpu_s")),
        "rss_ratio": statistics.median(ratios(composed, hand, "rss_bytes")),
        "loss_abs": max(
            abs(one - other) for run in composed for one, other in zip(run["losses"], hand[0]["losses"], strict=True)
        ),
        "lines": lines_changed(),
    }
    return {
        "rows": [row],
        "conditions": {**found, "load_1min_after": round(os.getloadavg()[0], 2)},
        "rounds": rounds,
        "steps": steps,
        "step_ratios": step_ratios,
        "control_ratios": controls,
        "handwritten": {"step_s": reference(r["step_s"] for r in hand), "cpu_s": reference(r["cpu_s"] for r in hand)},
        "last_loss": composed[-1]["losses"][-1],
        "wall_s": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Compare composer3d's step with FSDP2 written by hand.")
    parser.add_argument("--rounds", type=int, default=8, help="runs of composer3d; default 8")
    parser.add_argument("--steps", type=int, default=16, help="steps a run, of which 3 are not timed; default 16")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.steps <= NUM_WARMUP:
        parser.error(f"it takes at least 2 rounds, and more than {NUM_WARMUP} steps")
    found = run(arguments.rounds, arguments.steps)
    if arguments.json:
        say(json.dumps(found, indent=1))
        return
    for row in found["rows"]:
        say("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
