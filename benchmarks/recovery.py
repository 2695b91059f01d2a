"""How long a group of ranks that was lost takes its state from a peer's memory, beside reading it from a checkpoint.

Two groups of one rank (`replicas`) train equal layers with AdamW; the second one is killed, started again, and given
parameters and moments by the first one over loopback. Before its last step it reads the same state from a checkpoint:
after its files were dropped from the page cache, and once more from there. In each way the optimizer has no moments
before. The start of processes, which is the same, is not counted.

Usage: python benchmarks/recovery.py [--mib 64] [--rounds 3] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from harness import conditions, fail, say

LAYERS, SAMPLES = 8, 4
LOST_AT, STEPS = 3, 6


def model(mib: int) -> Any:
    """Return a model of so many MiB of float32 parameters, in equal layers."""
    from torch import nn

    side = int((mib * 2**20 / 4 / LAYERS) ** 0.5)
    return nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(LAYERS)))


def dropped(folder: Path) -> None:
    """Drop a folder's files, which are on the disk, from the page cache."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def train(manifest: str, folder: str, mib: int, rounds: int) -> None:
    """Train as the rank of a group; the one that was lost notes how long its state took."""
    import torch
    from torch.nn.functional import mse_loss

    import composer3d

    saved, is_lost = Path(folder, "step-1"), os.environ["COMPOSER3D_REPLICA"] == "1"
    is_again = os.environ["COMPOSER3D_REPLICA_ATTEMPT"] != "0"
    with composer3d.compose(model(mib), manifest, loss_fn=mse_loss) as run:
        optimizer, replicas = run.optimizer(torch.optim.AdamW, lr=1e-3), run.replicas
        assert replicas is not None
        took: list[float] = []
        receive, connect = replicas._receive, replicas._connect

        def timed(function: Any) -> Any:
            def call(quorum: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return function(quorum)
                finally:
                    took.append(time.perf_counter() - begin)

            return call

        # Receiving connects first: of both the times are kept, that of the connection before that of the whole.
        replicas._receive, replicas._connect = timed(receive), timed(connect)  # type: ignore[method-assign]
        layers: Any = run.model
        x = torch.ones(SAMPLES, layers[0].in_features)
        for step in range(replicas.begin(0), STEPS):
            if is_lost and not is_again and step == LOST_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS - 1 and not is_lost:
                run.save(saved)
            if step == STEPS - 1 and is_lost:  # the state that it has
                note_times(run, optimizer, saved, {"connect_s": took[0], "peer_s": took[1]}, rounds)
            with run.step(step):
                run.forward_backward(x, target=x)
                optimizer.step()
                optimizer.zero_grad()
        replicas.finish(STEPS, lambda: None)


def note_times(run: Any, optimizer: Any, saved: Path, peer: dict[str, float], rounds: int) -> None:
    """Read a checkpoint several times, and write what took how long."""
    while not saved.exists():  # the other group saves; a checkpoint appears whole
        time.sleep(0.01)
    found: dict[str, Any] = {**peer, "disk_s": [], "cache_s": []}
    for name in ("disk_s", "cache_s") * rounds:
        if name == "disk_s":
            dropped(saved)
        optimizer.state.clear()  # as a new process has it: moments are made in both ways
        begin = time.perf_counter()
        run.load(saved)
        found[name].append(time.perf_counter() - begin)
    (saved.parent / "found.json").write_text(json.dumps(found))


def measure(mib: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of each way."""
    from composer3d.replicas import ReplicaPolicy
    from composer3d.runner.launching.group_launcher import launch_groups

    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        manifest = folder / "run.toml"
        manifest.write_text("composer3d = 1\n[mesh]\nreplica = 2\n[train]\nmicrobatch = 1\n[communication.replicas]\n")
        options: dict[str, Any] = {
            "policy": ReplicaPolicy(minimum=2, silent_s=60.0),
            "num_groups": 2,
            "num_ranks": 1,
            "device": "cpu",
        }
        result = launch_groups(train, (str(manifest), name, mib, rounds), output=folder / "run", **options)
        if result.report is not None:
            fail(result.report.render())
        found = json.loads((folder / "found.json").read_text())
        size = sum(file.stat().st_size for file in (folder / "step-1").iterdir())
    medians = {name: round(statistics.median(found[name]), 3) for name in ("disk_s", "cache_s")}
    peer = {name: round(found[name], 3) for name in ("connect_s", "peer_s")}
    return {"state_mib": round(size / 2**20), **peer, **medians, "ratio": round(peer["peer_s"] / medians["disk_s"], 3)}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    stated = conditions()
    text = json.dumps({**measure(arguments.mib, arguments.rounds), "conditions": stated}, indent=1)
    say(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
