"""How long a save that is written in a thread holds up training, beside one that is waited for.

Both save the same tensors in turn in one process, so that a disk that slows down slows both. The stall is the time of
the call, and what the optimizer's step waits for copies that are not complete; what the thread writes meanwhile is not
waited for until the next save. Between them a matrix is multiplied, for as long as a forward and backward would take.
A state that a node keeps in its memory (`checkpoint.local_every`) is measured alike, and a copy made in the call.

    python benchmarks/save_stall.py [--mib 256] [--rounds 7] [--step-ms 500] [--output FILE]
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import conditions, say

import composer3d
from composer3d.checkpoint import Staging

LAYERS = 16


def model(mib: int) -> torch.nn.Module:
    """Return a model of so many MiB of float32 parameters, in equal layers."""
    side = int((mib * 2**20 / 4 / LAYERS) ** 0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(LAYERS)))


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def compute(milliseconds: float) -> None:
    """Multiply matrices for so long."""
    matrix, end = torch.ones(256, 256), time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        matrix @ matrix


def measure(mib: int, rounds: int, step_ms: float) -> dict[str, Any]:
    """Return medians of the times, and their ratio."""
    folder = Path(tempfile.mkdtemp(prefix="save-stall-"))
    try:
        manifest = folder / "run.toml"
        manifest.write_text("composer3d = 1\n")
        run = composer3d.compose(model(mib), manifest, loss_fn=lambda out, _: out.sum(), device="cpu")
        times: dict[str, list[float]] = collections.defaultdict(list)
        local = Staging()
        for number in range(rounds + 1):
            found = {"synchronous_s": timed(lambda: run.save(folder / "step-1"))}
            stalls: dict[str, Callable[[], object]] = {
                "copied_in_the_call_s": lambda: run.save(folder / "step-2", asynchronous=True),
                "stall_s": lambda: run.save(folder / "step-2", asynchronous=True, deferred=True),
                "local_stall_s": lambda: run.rank_state.copy(local),
            }
            for name, call in stalls.items():
                called = timed(call)
                compute(step_ms)
                found[name] = called + timed(run._persistence.copies.settle)
                run._persistence.wait()  # what the thread does must not slow down the next one
            if number:  # the first takes memory
                for name, seconds in found.items():
                    times[name].append(seconds)
        run.close()
    finally:
        shutil.rmtree(folder)
    medians = {name: round(statistics.median(values), 4) for name, values in times.items()}
    ratios = [stall / whole for stall, whole in zip(times["stall_s"], times["synchronous_s"], strict=True)]
    return medians | {"stall_over_synchronous": round(statistics.median(ratios), 4), "worst": round(max(ratios), 4)}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step-ms", type=float, default=500.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    stated = conditions()
    result = {
        "mib": arguments.mib,
        "rounds": arguments.rounds,
        **measure(arguments.mib, arguments.rounds, arguments.step_ms),
    }
    text = json.dumps({**result, "conditions": stated}, indent=1)
    say(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
