"""Step time, CPU time and memory of composer3d against torch's own calls written by hand, on the same model and data.

`loops/one_device.py` is a training loop for one device, `loops/embedded.py` the same with composer3d, and
`loops/handwritten_fsdp2.py` the same with FSDP2 written by hand. Further rows are of two and three dimensions: the
embedded loop with other manifests, and `loops/handwritten_3d.py`; or of a sequence that ranks share, beside
`loops/handwritten_cp.py`, which has attention with gathered keys or around a ring by hand; or of experts on two ranks,
beside `loops/handwritten_ep.py`, which has the same exchange of rows by hand; for orientation also beside
`loops/handwritten_fsdp2.py`, which shards all experts and has no exchange. Every round starts three worlds of a
row's ranks in fresh processes: hand-written, composer3d, and hand-written once more as the control. They take turns
step by step, always in this order, so that a machine that becomes slower or faster does so for all of them, and each
of them follows another one, which has taken the caches.

ratio: of a step, composer3d's time over the geometric mean of the two hand-written ones beside it; of a round the
    median over steps, and then the median over rounds.
control: the same with the control's time over that of the other hand-written one before and after it (A/A). Those
    ratios are above and below 1; control is their typical distance from 1: the median of max(r, 1/r). What lies within
    it cannot be told from no difference.
cpu_ratio, cpu_control: the same of process CPU time a step.
rss_ratio: the same of the peak of resident memory, once a round.
loss_abs: the largest difference, over all steps and rounds, between composer3d's loss, which is that of the global
    batch, and the mean of the hand-written ranks' losses.
lines: lines of the one-device loop added or changed to embed composer3d, by `git diff --no-index --numstat`.

The rows of more dimensions share the cores among 4 or 8 ranks a world, so each has one round and fewer steps, and its
control tells less. With the defaults all rows take about 8 minutes on 2 cores, 5 of them the first row.
Usage: python benchmarks/step_time.py [--rows fsdp2] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import World, conditions, fail, note, say

LOOPS = Path(__file__).resolve().parent / "loops"
NUM_WARMUP = 2
TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is compared in a row.

    Args:
        name: In the results.
        num_ranks: Of each world.
        hand: The hand-written loop and its arguments after the number of steps.
        composed: The same of composer3d's loop.
    """

    name: str
    num_ranks: int
    hand: tuple[str, ...]
    composed: tuple[str, ...]


def dimensions(pp: int, dp: int, tp: int) -> Layout:
    """Return the row of a layout in several dimensions."""
    short = "_".join(f"{axis}{degree}" for axis, degree in (("pp", pp), ("dp", dp), ("tp", tp)) if degree > 1)
    return Layout(
        name=f"{short.replace('_', ' x ')}, small Llama, {pp * dp * tp} ranks",
        num_ranks=pp * dp * tp,
        hand=("handwritten_3d", str(pp), str(dp), str(tp)),
        composed=("embedded_3d", f"embedded_{short}.toml", "small_llama"),
    )


def sequence(method: str, short: str) -> Layout:
    """Return the row of a sequence that two ranks share."""
    return Layout(
        name=f"cp2, {method}, small Llama, 2 ranks",
        num_ranks=2,
        hand=("handwritten_cp", method),
        composed=("embedded_3d", f"embedded_{short}.toml", "small_llama"),
    )


LAYOUTS = {
    "fsdp2": Layout(
        name="fsdp2, small Llama, 2 ranks",
        num_ranks=2,
        hand=("handwritten_fsdp2", "small_llama"),
        composed=("embedded",),
    ),
    "pp2_dp2": dimensions(2, 2, 1),
    "dp2_tp2": dimensions(1, 2, 2),
    "pp2_dp2_tp2": dimensions(2, 2, 2),
    "cp2": sequence("gather", "cp2"),
    "cp2_ring": sequence("ring", "cp2_ring"),
    "moe_ep2": Layout(
        name="ep2, mixture of 8 experts, 2 ranks",
        num_ranks=2,
        hand=("handwritten_ep",),
        composed=("embedded_3d", "embedded_moe_ep2.toml", "small_moe"),
    ),
    "moe_ep2_beside_fsdp2": Layout(
        name="ep2 beside FSDP2 of all experts, 2 ranks, for orientation",
        num_ranks=2,
        hand=("handwritten_fsdp2", "small_moe"),
        composed=("embedded_3d", "embedded_moe_ep2.toml", "small_moe"),
    ),
}


def measure(layout: Layout, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Run one round of so many steps; return what every rank reported, by loop."""
    worlds: dict[str, World] = {}
    try:
        for name, (loop, *more) in {"hand": layout.hand, "composer3d": layout.composed, "control": layout.hand}.items():
            script = LOOPS / f"{loop}.py"
            worlds[name] = World(script, str(steps), *more, num_ranks=layout.num_ranks, timeout_s=TIMEOUT_S)
        for world in worlds.values():
            world.wait()
        for _ in range(steps):
            for world in worlds.values():
                world.turn()
        return {name: [json.loads(line) for line in world.turn()] for name, world in worlds.items()}
    finally:
        for world in worlds.values():
            world.close()


def per_step(ranks: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Return the mean over ranks of every step that is timed."""
    return [statistics.mean(values) for values in zip(*(rank[key][NUM_WARMUP:] for rank in ranks), strict=True)]


def ratio(found: dict[str, list[dict[str, Any]]], key: str) -> float:
    """Return composer3d's ratio in one round."""
    steps = zip(*(per_step(found[name], key) for name in ("composer3d", "hand", "control")), strict=True)
    return statistics.median(one / math.sqrt(before * after) for one, before, after in steps)


def control(found: dict[str, list[dict[str, Any]]], key: str) -> float:
    """Return the control's ratio in one round."""
    hand = per_step(found["hand"], key)
    steps = zip(per_step(found["control"], key)[:-1], hand[:-1], hand[1:], strict=True)
    return statistics.median(one / math.sqrt(before * after) for one, before, after in steps)


def rss_ratio(found: dict[str, list[dict[str, Any]]]) -> float:
    """Return the ratio of peaks of resident memory in one round."""
    one, *others = (
        statistics.mean(rank["peak_rss_bytes"] for rank in found[name]) for name in ("composer3d", "hand", "control")
    )
    return one / statistics.mean(others)


def loss_difference(found: dict[str, list[dict[str, Any]]]) -> float:
    """Return the largest difference of losses in one round."""
    losses = {name: zip(*(rank["losses"] for rank in ranks), strict=True) for name, ranks in found.items()}
    pairs = zip(losses["composer3d"], losses["hand"], strict=True)
    return max(abs(own - statistics.mean(by_hand)) for composed, by_hand in pairs for own in composed)


def spread(ratios: Sequence[float]) -> float:
    """Return the typical distance of ratios from 1, as a ratio."""
    return statistics.median(max(ratio, 1 / ratio) for ratio in ratios)


def lines_changed() -> int:
    """Count the lines of the one-device loop that embedding adds or changes; a changed line is added and deleted."""
    command = ["git", "diff", "--no-index", "--numstat", "one_device.py", "embedded.py"]
    done = subprocess.run(command, cwd=LOOPS, capture_output=True, text=True)
    if done.returncode != 1 or not done.stdout:
        fail(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr.rstrip()}")
    added, deleted = done.stdout.split()[:2]
    return max(int(added), int(deleted))


def compare(layout: Layout, rounds: int, steps: int) -> dict[str, Any]:
    """Measure one row; return it with what it was computed from."""
    started, found = time.monotonic(), []
    for number in range(rounds):
        found.append(measure(layout, steps))
        seconds = time.monotonic() - started
        note(f"{layout.name}: round {number + 1} of {rounds}: {ratio(found[-1], 'step_s'):.4f}, {seconds:.0f} s")
    controls = [control(one, "step_s") for one in found]
    row = {
        "name": layout.name,
        "ratio": statistics.median(ratio(one, "step_s") for one in found),
        "control": spread(controls),
        "cpu_ratio": statistics.median(ratio(one, "cpu_s") for one in found),
        "cpu_control": spread([control(one, "cpu_s") for one in found]),
        "rss_ratio": statistics.median(map(rss_ratio, found)),
        "loss_abs": max(map(loss_difference, found)),
    }
    details = {
        "rounds": rounds,
        "steps": steps,
        "step_ratios": [ratio(one, "step_s") for one in found],
        "control_ratios": controls,
        "handwritten_step_s": statistics.median(second for one in found for second in per_step(one["hand"], "step_s")),
        "handwritten_last_losses": [rank["losses"][-1] for rank in found[-1]["hand"]],
        "composer3d_last_loss": found[-1]["composer3d"][0]["losses"][-1],
        "wall_s": round(time.monotonic() - started, 1),
    }
    return {"row": row, "details": details}


def run(names: Sequence[str], sizes: Mapping[bool, tuple[int, int]]) -> dict[str, Any]:
    """Measure rows, and return what `--json` prints.

    Args:
        names: Of `LAYOUTS`.
        sizes: Rounds and steps, of the first layout (True) and of the others.
    """
    measured_under, started = conditions(), time.monotonic()
    found = {name: compare(LAYOUTS[name], *sizes[name == "fsdp2"]) for name in names}
    if "fsdp2" in found:
        found["fsdp2"]["row"]["lines"] = lines_changed()
    return {
        "rows": [one["row"] for one in found.values()],
        "conditions": {**measured_under, "load_1min_after": round(os.getloadavg()[0], 2)},
        "details": {name: one["details"] for name, one in found.items()},
        "wall_s": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Compare composer3d's step with torch's own calls written by hand.")
    parser.add_argument("--rounds", type=int, default=8, help="fresh processes so many times; default 8")
    parser.add_argument("--steps", type=int, default=10, help="steps a round; default 10")
    parser.add_argument("--rounds-3d", type=int, default=1, help="the same of the other rows; default 1")
    parser.add_argument("--steps-3d", type=int, default=8, help="the same of the other rows; default 8")
    parser.add_argument("--rows", nargs="+", choices=["all", *LAYOUTS], default=["all"], help="default all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    sizes = {True: (arguments.rounds, arguments.steps), False: (arguments.rounds_3d, arguments.steps_3d)}
    if any(rounds < 1 or steps <= NUM_WARMUP + 1 for rounds, steps in sizes.values()):
        parser.error(f"it takes a round of more than {NUM_WARMUP + 1} steps; the first {NUM_WARMUP} are not timed")
    found = run([name for name in LAYOUTS if {"all", name} & set(arguments.rows)], sizes)
    if arguments.json:
        say(json.dumps(found, indent=1))
        return
    for row in found["rows"]:
        say("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
