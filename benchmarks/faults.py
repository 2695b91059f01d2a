"""What a killed rank costs a run of two groups of two ranks: seconds without a step, steps done again, losses.

Two groups with FSDP2, or a pipeline of two stages, inside train a small model in float64. Whenever both have made a
step together since the last kill, a rank is chosen and killed after a random time, whatever it does then. Every group
writes the loss and time of each of its steps; afterwards one device runs the same steps without disturbance.

gap: from a kill to the next step of the group that is left. back: to the first step of both.
asking: what finding out who takes part, and voting, take of a step of a rank when nothing fails, waits included;
asking_cpu: of its thread's CPU time. goodput: steps made, times an undisturbed one's seconds, over the seconds of all.

Usage: python benchmarks/faults.py [--kills 100] [--layout fsdp2|pp] [--stop] [--seconds 600] [--json]
       python benchmarks/faults.py --every 50 --kills 20    a kill every 50 steps, over 1,000
       python benchmarks/faults.py --kills 0 --seconds 60   nothing fails
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"

from harness import conditions, fail, say

LAYOUTS = {
    "fsdp2": "dp_shard = 2\n[sharding.fsdp2]",
    "pp": 'pp = 2\n[model]\nblocks = "layers.*"\n[scheduling.pipeline]\nschedule = "1F1B"',
}
SAMPLES, WIDTH = 16, 32
FIRST_KILL_S = 1.0
SILENT_S = 5.0


def model() -> Any:
    """Return a few layers with dropout."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)

    return nn.Sequential(OrderedDict(layers=nn.Sequential(*(Block() for _ in range(4))), head=nn.Linear(WIDTH, 1)))


def batch(step: int) -> tuple[Any, Any]:
    """Return the global batch of a step."""
    import torch

    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(SAMPLES, size, generator=generator, dtype=torch.float64) for size in (WIDTH, 1))


def counted(function: Callable[..., Any], asked: dict[str, float]) -> Callable[..., Any]:
    """Return a function that adds the seconds that it takes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            asked["asking_s"] += time.perf_counter() - begun[0]
            asked["asking_cpu_s"] += time.thread_time() - begun[1]

    return call


def train(manifest: str, folder: str, num_steps: int | None) -> None:
    """Train as one rank until all are told to stop, or for so many steps."""
    import torch
    from torch.nn.functional import mse_loss

    import composer3d

    torch.set_default_dtype(torch.float64)
    group, rank = os.environ.get("COMPOSER3D_REPLICA", "0"), os.environ["RANK"]
    stop = Path(folder, "stop")
    with (
        composer3d.compose(model, manifest, loss_fn=mse_loss, example=((batch(0)[0][:1],), {})) as run,
        open(f"{folder}/{group}.jsonl", "a") as rows,
    ):
        optimizer, replicas = run.optimizer(torch.optim.AdamW, lr=1e-3), run.replicas
        asked = {"asking_s": 0.0, "asking_cpu_s": 0.0}
        for name in () if replicas is None else ("ask", "vote"):
            setattr(replicas._client, name, counted(getattr(replicas._client, name), asked))
        step = 0 if replicas is None else replicas.begin(0)
        size = SAMPLES // run.context.data_parallel_degree
        mine = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
        while step != num_steps:
            begun = time.perf_counter()
            asked.update(asking_s=0.0, asking_cpu_s=0.0)
            if replicas is not None and replicas.convene(step, stop=stop.exists()):
                break
            x, y = batch(step)
            with run.step(step) as state:
                loss = float(run.forward_backward(x[mine], target=y[mine]))
                run.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            row = {"step": step, "loss": loss, "time": time.time(), "pid": os.getpid(), "rank": int(rank)}
            row |= {"whole_s": time.perf_counter() - begun, **asked, **state.metrics}
            if rank == "0" or num_steps is None:
                os.write(rows.fileno(), (json.dumps(row) + "\n").encode())
            step += 1
        if replicas is not None:
            replicas.finish(step, lambda: None)


def launch(folder: Path, layout: str) -> Any:
    """Run the groups to their end."""
    from composer3d.replicas import ReplicaPolicy
    from composer3d.runner.launching.group_launcher import launch_groups

    manifest = folder / "run.toml"
    text = f"composer3d = 1\n[mesh]\nreplica = 2\n{LAYOUTS[layout]}\n[train]\nmicrobatch = 1\n"
    manifest.write_text(f"{text}[communication.replicas]\n")
    policy = ReplicaPolicy(silent_s=SILENT_S, restarts=10)
    options = {"policy": policy, "num_groups": 2, "num_ranks": 2, "device": "cpu", "output": folder / "run"}
    result = launch_groups(train, (str(manifest), str(folder), None), **options)
    return {"ok": result.ok, "report": None if result.report is None else result.report.render()}


def rows_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each group has written; a line that is being written is left out."""
    found: dict[int, list[dict[str, Any]]] = {}
    for group in range(2):
        path = folder / f"{group}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found[group] = [json.loads(line) for line in lines]
    return found


def disturb(
    folder: Path, child: Any, *, kills: int, number: signal.Signals, every: int, until: float
) -> list[dict[str, Any]]:
    """Kill ranks one after another, each once both groups train again, and so many steps have been made since."""
    chosen, events = random.Random(0), []
    while (len(events) < kills or not kills or every) and time.monotonic() < until and not child.ready():
        time.sleep(0.02)
        if every and max((row["step"] for rows in rows_of(folder).values() for row in rows), default=0) < every * (
            len(events) + 1
        ):
            continue
        if len(events) == kills:
            if every:
                break
            continue
        since = events[-1]["time"] if events else 0.0
        both = {
            group: {row["rank"]: row["pid"] for row in rows[-8:] if row["time"] > since and row.get("groups") == 2.0}
            for group, rows in rows_of(folder).items()
        }
        if any(len(ranks) < 2 for ranks in both.values()):
            continue
        time.sleep(chosen.random() * FIRST_KILL_S)
        group, rank = chosen.randrange(2), chosen.randrange(2)
        at = max(row["step"] for rows in rows_of(folder).values() for row in rows)
        os.kill(both[group][rank], number)
        events.append({"time": time.time(), "group": group, "rank": rank, "step": at})
    return events


def figures(folder: Path, events: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the kills have cost."""
    rows = {group: [row for row in found if row["rank"] == 0] for group, found in rows_of(folder).items()}
    gaps, backs = [], []
    for event in events:
        others = [row["time"] for row in rows[1 - event["group"]] if row["time"] > event["time"]]
        both = [row["time"] for row in rows[event["group"]] if row["time"] > event["time"]]
        gaps += [others[0] - event["time"]] if others else []
        backs += [both[0] - event["time"]] if both else []
    made = {row["step"] for found in rows.values() for row in found}
    expected = {row["step"]: row["loss"] for row in reference}
    worst = max(
        abs(row["loss"] - expected[row["step"]]) / expected[row["step"]] for each in rows.values() for row in each
    )
    times = sorted(row["time"] for found in rows.values() for row in found)
    quiet = [row for row in rows[0] if not any(0 <= row["time"] - event["time"] < 3 for event in events)] or rows[0]
    return {
        "kills": len(events),
        "went_on": len(gaps),
        "steps": len(made),
        "steps_missing": max(made) + 1 - len(made),
        "steps_repeated": max((row.get("repeated", 0.0) for each in rows.values() for row in each), default=0.0),
        "gap_s": {"median": statistics.median(gaps), "worst": max(gaps)} if gaps else None,
        "back_s": {"median": statistics.median(backs), "worst": max(backs)} if backs else None,
        "loss_difference": worst,
        "step_ms": 1e3 * statistics.median(row["whole_s"] for row in quiet),
        "asking_ms": 1e3 * statistics.median(row["asking_s"] for row in quiet),
        "asking_cpu_ms": 1e3 * statistics.median(row["asking_cpu_s"] for row in quiet),
        "goodput": len(made) * statistics.median(row["whole_s"] for row in quiet) / (times[-1] - times[0]),
    }


def on_one_device(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Train undisturbed on one rank, in a folder that is made; return its rows."""
    from composer3d.processes import Child
    from composer3d.runner import launch_local

    folder.mkdir()
    (folder / "run.toml").write_text("composer3d = 1\n[train]\nmicrobatch = 1\n")
    work = (str(folder / "run.toml"), str(folder), num_steps)

    def undisturbed() -> dict[str, Any]:
        return {"ok": launch_local(train, work, num_ranks=1, device="cpu", output=folder / "run").ok}

    assert Child(undisturbed).result()["ok"], "one device runs undisturbed"
    return [json.loads(line) for line in (folder / "0.jsonl").read_text().splitlines()]


def tell(found: dict[str, Any], *, as_json: bool) -> NoReturn:
    """Print what was found, and end: with 1 where a run did not go on."""
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for key, value in found.items():
            say(f"{key}: {value}")
    sys.exit(0 if found["ended"] == "finished" and found["went_on"] == found["kills"] else 1)


def main() -> None:
    """Disturb a run, and print what it has cost."""
    parser = argparse.ArgumentParser(description="Kill ranks of a run of two groups.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="fsdp2")
    parser.add_argument("--every", type=int, default=0, help="steps between two kills; default: at random moments")
    parser.add_argument("--stop", action="store_true", help="stop ranks (SIGSTOP) in place of killing them")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no rank is killed any more")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from composer3d.processes import Child, prewarm

    prewarm()
    found: dict[str, Any] = {
        "conditions": conditions(),
        "layout": arguments.layout,
        "signal": "STOP" if arguments.stop else "KILL",
        "every": arguments.every or None,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = Child(lambda: launch(folder, arguments.layout))
        number = signal.SIGSTOP if arguments.stop else signal.SIGKILL
        until = time.monotonic() + arguments.seconds
        events = disturb(folder, child, kills=arguments.kills, number=number, every=arguments.every, until=until)
        time.sleep(0 if child.ready() else 2)
        (folder / "stop").touch()
        ended = child.result()
        found["ended"] = ended["report"] or "finished"
        rows = rows_of(folder)
        if not any(rows.values()):
            fail(found["ended"])
        num_steps = 1 + max(row["step"] for each in rows.values() for row in each)
        found |= figures(folder, events, on_one_device(folder / "alone", num_steps))
    tell(found, as_json=arguments.json)


if __name__ == "__main__":
    main()
