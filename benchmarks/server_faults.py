"""What the loss of the machine that knows who takes part costs: seconds without a step, steps done again, losses.

Three machines of one group each, process trees of this one, train the small model of `faults` in float64; all may
serve. Whenever all have made a step together since the last kill, the machine that serves is killed with its ranks (or
stopped, with `--stop`) after a random time; another one takes over, and the lost one is started again. Afterwards one
device runs the same steps without disturbance.

gap: from a kill to the next step of those that are left. back: to the first step of all three.

Usage: python benchmarks/server_faults.py [--kills 20] [--stop] [--seconds 600] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from faults import on_one_device, tell, train
from harness import conditions, fail

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.process_trees import tree_of  # noqa: E402  # the tests' own

NODES, SILENT_S, FIRST_KILL_S, BACK_S = 3, 5.0, 1.0, 240.0


def endpoints() -> str:
    """Return a free address for each machine."""
    found = []
    for node in range(NODES):
        with socket.create_server((f"127.0.0.{2 + node}", 0)) as probe:
            found.append(f"127.0.0.{2 + node}:{probe.getsockname()[1]}")
    return ",".join(found)


def start(folder: Path, node: int, endpoint: str) -> Any:
    """Start a machine."""
    from composer3d.processes import Child

    def launch() -> dict[str, Any]:
        from composer3d.replicas import ReplicaPolicy
        from composer3d.runner.launching.group_launcher import launch_groups
        from composer3d.runner.launching.node_place import NodePlace

        (folder / f"node-{node}.pid").write_text(str(os.getpid()))
        place = NodePlace(count=NODES, rank=node, endpoint=endpoint)
        options: dict[str, Any] = {"num_groups": NODES, "num_ranks": 1, "device": "cpu", "output": folder / "run"}
        options |= {"policy": ReplicaPolicy(silent_s=SILENT_S, restarts=10), "place": place}
        result = launch_groups(train, (str(folder / "run.toml"), str(folder), None), **options)
        return {"ok": result.ok, "report": None if result.report is None else result.report.render()}

    return Child(launch)


def rows_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each group has written; a line that is being written is left out."""
    paths = {group: folder / f"{group}.jsonl" for group in range(NODES)}
    return {
        group: [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
        for group, path in paths.items()
    }


def serving(folder: Path) -> int | None:
    """Return the machine that serves, by the newest term."""
    found: list[tuple[int, int]] = []
    for path in (folder / "run").glob(".nodes-*/term-*"):
        with contextlib.suppress(OSError, ValueError):  # it is being written
            found.append((int(path.name.removeprefix("term-")), json.loads(path.read_text())["node"]))
    return max(found)[1] if found else None


def send(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def are_together(folder: Path, since: float) -> bool:
    """Return whether all machines have made a step together since a time."""
    rows = rows_of(folder)
    return all(any(row["time"] > since and row.get("groups") == NODES for row in rows[node]) for node in rows)


def disturb(
    folder: Path, endpoint: str, machines: dict[int, Any], *, kills: int, stop: bool, until: float
) -> list[Any]:
    """Kill the machine that serves, again and again, each time that all have trained together since."""
    chosen, events = random.Random(0), list[dict[str, Any]]()
    while len(events) < kills and time.monotonic() < until:
        time.sleep(0.02)
        node = serving(folder)
        if node is None or not are_together(folder, events[-1]["time"] if events else 0.0):
            continue
        time.sleep(chosen.random() * FIRST_KILL_S)
        pids = tree_of(int((folder / f"node-{node}.pid").read_text()))
        send(pids, signal.SIGSTOP if stop else signal.SIGKILL)
        events.append({"time": time.time(), "node": node})
        others = [each for each in range(NODES) if each != node]
        while not any(row["time"] > events[-1]["time"] for each in others for row in rows_of(folder)[each]):
            if time.monotonic() > until or all(machines[each].ready() for each in others):
                return events
            time.sleep(0.02)
        send(pids, signal.SIGKILL)
        machines[node] = start(folder, node, endpoint)
    return events


def figures(folder: Path, events: list[Any], reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the kills have cost."""
    rows = rows_of(folder)
    gaps, backs = [], []
    for event in events:
        after = {node: [row["time"] for row in rows[node] if row["time"] > event["time"]] for node in rows}
        others = [times[0] for node, times in after.items() if times and node != event["node"]]
        gaps += [min(others) - event["time"]] if others else []
        backs += [after[event["node"]][0] - event["time"]] if after[event["node"]] else []
    every = [row for found in rows.values() for row in found]
    made, expected = {row["step"] for row in every}, {row["step"]: row["loss"] for row in reference}
    differences = [abs(row["loss"] - expected[row["step"]]) / expected[row["step"]] for row in every]
    return {
        "kills": len(events),
        "went_on": len(gaps),
        "steps": len(made),
        "steps_missing": max(made) + 1 - len(made),
        "steps_repeated": max(row.get("repeated", 0.0) for row in every),
        "gap_s": {"median": statistics.median(gaps), "worst": max(gaps)} if gaps else None,
        "back_s": {"median": statistics.median(backs), "worst": max(backs)} if backs else None,
        "loss_difference": max(differences),
        "step_ms": 1e3 * statistics.median(row["whole_s"] for row in every),
    }


def main() -> None:
    """Disturb a run, and print what it has cost."""
    parser = argparse.ArgumentParser(description="Kill the machine that knows who takes part in a step.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stop", action="store_true", help="stop the machine (SIGSTOP) in place of killing it")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no machine is killed any more")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from composer3d.processes import ChildError, prewarm
    from composer3d.replicas import TOKEN

    prewarm()
    os.environ[TOKEN] = secrets.token_hex(16)
    found: dict[str, Any] = {"conditions": conditions(), "signal": "STOP" if arguments.stop else "KILL"}
    with tempfile.TemporaryDirectory() as name:
        folder, endpoint = Path(name), endpoints()
        text = f"composer3d = 1\n[mesh]\nreplica = {NODES}\ndp_shard = 1\n[train]\nmicrobatch = 1\n[sharding.fsdp2]\n"
        (folder / "run.toml").write_text(f"{text}[communication.replicas]\nsilent_s = {SILENT_S}\n")
        machines = {node: start(folder, node, endpoint) for node in range(NODES)}
        until = time.monotonic() + arguments.seconds
        events = disturb(folder, endpoint, machines, kills=arguments.kills, stop=arguments.stop, until=until)
        until = time.monotonic() + BACK_S  # one that came after the end would wait for somebody to serve
        while events and not are_together(folder, events[-1]["time"]) and time.monotonic() < until:
            time.sleep(0.1)
        (folder / "stop").touch()
        ended = []
        for machine in machines.values():
            with contextlib.suppress(ChildError):
                ended.append(machine.result())
        found["ended"] = next((each["report"] for each in ended if each["report"]), "finished")
        if not any(rows_of(folder).values()):
            fail(found["ended"])
        num_steps = 1 + max(row["step"] for each in rows_of(folder).values() for row in each)
        found |= figures(folder, events, on_one_device(folder / "alone", num_steps))
    tell(found, as_json=arguments.json)


if __name__ == "__main__":
    main()
