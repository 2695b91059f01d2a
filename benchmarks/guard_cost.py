"""What the step guard adds to the all-reduce that carries the token count: CPU time of a step's opening.

Two ranks along tp, on gloo, agree in turns through a guard that only counts and one that compares, on a batch of 8
sequences of 2048 tokens with as many targets, whose identity is part of the cost. Process CPU time is compared, all
threads included, so that waiting for the other rank is not; the larger of the two ranks is told.

guard: the budget is 0.2 % of a step of 100 ms.

Usage: python benchmarks/guard_cost.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "1"

from harness import conditions, say

from composer3d.testing import run_ranks

STEP_MS = 100.0
BUDGET_PERCENT = 0.2
SHAPE = (8, 2048)
BLOCK = 50  # steps timed at a time


def measure(blocks: int) -> list[float]:
    """Return microseconds of CPU time that the guard adds to a step, a value for each pair of blocks."""
    import torch
    import torch.distributed as dist

    from composer3d.mesh import AXES, resolve
    from composer3d.step.guard import Guard

    layout = resolve({"tp": 2}, axes=AXES, world_size=2, default=None)
    guards = [
        Guard(layout=layout, rank=dist.get_rank(), group=None, device=torch.device("cpu"), plan=1, compares=compares)
        for compares in (False, True)
    ]
    batch = (torch.randint(0, 50_000, SHAPE, generator=torch.Generator().manual_seed(0)),) * 2
    added, number = [], 0
    for block in range(blocks + 2):
        spent = []
        for guard in guards:
            started = time.process_time_ns()
            for _ in range(BLOCK):
                guard.agree(step=number, call=0, counts=[1, 1], digest=guard.digest(batch))
                number += 1
            spent.append((time.process_time_ns() - started) / BLOCK / 1000)
        if block >= 2:  # the first two warm up
            added.append(spent[1] - spent[0])
    return added


def main() -> None:
    """Read the command line, measure, print; exit code 1 above the budget."""
    parser = argparse.ArgumentParser(description="Measure what the step guard adds to a step.")
    parser.add_argument("--blocks", type=int, default=40, help=f"pairs of blocks of {BLOCK} steps; default 40")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = conditions()
    us = max(statistics.median(added) for added in run_ranks(measure, 2, arguments.blocks))
    percent = us / (STEP_MS * 1000) * 100
    row = {"name": "guard", "us": round(us, 1), "percent": round(percent, 3), "budget_percent": BUDGET_PERCENT}
    if arguments.json:
        found["load_1min_after"] = round(os.getloadavg()[0], 2)
        say(json.dumps({"rows": [row | {"step_ms": STEP_MS}], "conditions": found}, indent=1))
    else:
        say(f"guard: {row['us']} microseconds a step, {row['percent']} % of {STEP_MS:g} ms")
    raise SystemExit(1 if percent > BUDGET_PERCENT else 0)


if __name__ == "__main__":
    main()
