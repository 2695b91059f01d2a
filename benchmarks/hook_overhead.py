"""What five plugins add to a step through hooks: actions at every point, spans, metrics.

Three loops run alternately on a model of one number, in a world whose collectives return at once, so that neither the
model's work nor the network is in the result: plain torch, composer3d without a plugin, and composer3d with five
plugins. Each of the five (`busy.py`) implements every hook that is called in a step: an action at each of the 12
step points (one of them a vote on skipping the step), a recorder of spans, metrics measured and metrics taken. Times
are the thread's CPU time, which does not grow while other processes have the cores.

hooks: five plugins against none; the budget is 100 microseconds a step.
engine: composer3d without a plugin against plain torch: the step's bookkeeping, three collectives included as calls.

With --beside, another checkout, such as one of an earlier commit (`git worktree add`), is measured in turns with this
one: microseconds depend on the machine and on what else it does, their ratio hardly.

Usage: python benchmarks/hook_overhead.py [--beside CHECKOUT] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from harness import conditions, fail, say
from torch import Tensor, nn

import composer3d
from composer3d.testing import fake_world

BUDGET_US = 100.0
NUM_PLUGINS = 5
BLOCK = 50  # steps timed at a time
ROUNDS = 5


class One(nn.Module):
    """A model of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).sum()


def plain(x: Tensor, target: Tensor) -> Callable[[int], None]:
    """Return a step in plain torch."""
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(number: int) -> None:
        loss = loss_fn(model(x), target) / target.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def composed(x: Tensor, target: Tensor, num_plugins: int) -> Callable[[int], None]:
    """Return a composed step with so many plugins."""
    tables = "".join(
        f'[profiling.busy{number}]\nuse = "busy:Busy"\nnumber = {number}\n' for number in range(num_plugins)
    )
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "run.toml"
        manifest.write_text("composer3d = 1\n" + tables)
        run = composer3d.compose(One(), manifest, loss_fn=loss_fn, device="cpu")
    optimizer = run.optimizer(torch.optim.SGD, lr=0.0)

    def step(number: int) -> None:
        with run.step(number):
            loss = float(run.forward_backward(x, target=target))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        run.report(number, {"loss": loss})

    return step


def measure(blocks: int) -> dict[str, list[float]]:
    """Time the three loops in alternating blocks; microseconds of the thread's CPU time a step."""
    x, target = torch.ones(8), torch.zeros(8)
    steps = {"plain": plain(x, target), "none": composed(x, target, 0), "five": composed(x, target, NUM_PLUGINS)}
    result: dict[str, list[float]] = {name: [] for name in steps}
    number = 0
    for block in range(blocks + 2):
        for name, step in steps.items():
            started = time.thread_time_ns()
            for _ in range(BLOCK):
                step(number)
                number += 1
            if block >= 2:  # the first two warm up
                result[name].append((time.thread_time_ns() - started) / BLOCK / 1000)
    return result


def measured_in(checkout: Path, blocks: int) -> dict[str, float]:
    """Return microseconds by row, of this benchmark with the packages of a checkout."""
    packages = os.pathsep.join(map(str, (checkout, checkout / "plugins")))
    command = [sys.executable, __file__, "--json", "--blocks", str(blocks)]
    environment = {**os.environ, "PYTHONPATH": packages}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return {row["name"]: row["us"] for row in json.loads(done.stdout)["rows"]}


def say_beside(checkout: Path, blocks: int) -> None:
    """Measure this checkout and another one in turns, and print both and their ratio."""
    trees = {"this": Path(__file__).resolve().parents[1], "other": checkout.resolve()}
    if not all((path / "composer3d" / "__init__.py").is_file() for path in trees.values()):
        fail(f"{checkout} holds no composer3d")
    rounds = [{tree: measured_in(path, blocks) for tree, path in trees.items()} for _ in range(ROUNDS)]
    for name in ("hooks", "engine"):
        this, other = (statistics.median(each[tree][name] for each in rounds) for tree in trees)
        ratio = statistics.median(each["this"][name] / each["other"][name] for each in rounds)
        say(f"{name}: {this:.0f} microseconds a step, {other:.0f} in {checkout}, ratio {ratio:.2f}")


def main() -> None:
    """Read the command line, measure, print; exit code 1 above the budget."""
    parser = argparse.ArgumentParser(description="Measure what hooks add to a step.")
    parser.add_argument("--blocks", type=int, default=40, help=f"blocks of {BLOCK} steps of each loop; default 40")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--beside", type=Path, help=f"another checkout to measure in {ROUNDS} turns with this one")
    arguments = parser.parse_args()
    if arguments.beside is not None:
        return say_beside(arguments.beside, arguments.blocks)
    found = conditions()
    with fake_world(1):
        times = measure(arguments.blocks)
    hooks = [five - none for five, none in zip(times["five"], times["none"], strict=True)]
    engine = [none - plain for none, plain in zip(times["none"], times["plain"], strict=True)]
    rows = [
        {"name": "hooks", "us": round(statistics.median(hooks), 1), "budget_us": BUDGET_US, "plugins": NUM_PLUGINS},
        {"name": "engine", "us": round(statistics.median(engine), 1), "budget_us": None, "plugins": 0},
    ]
    if arguments.json:
        found["load_1min_after"] = round(os.getloadavg()[0], 2)
        say(json.dumps({"rows": rows, "conditions": found}, indent=1))
    else:
        for row in rows:
            say(f"{row['name']}: {row['us']} microseconds a step")
    raise SystemExit(1 if rows[0]["us"] > BUDGET_US else 0)


if __name__ == "__main__":
    main()
