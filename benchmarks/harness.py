"""What the benchmarks share: a world of fresh processes, and the conditions under which something was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["conditions", "fail", "note", "run_world", "say"]


def say(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line of progress to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def fail(text: str) -> None:
    """End the benchmark with exit code 1 and a reason."""
    note(text)
    raise SystemExit(1)


def conditions() -> dict[str, Any]:
    """Return when, on what kind of machine and with which versions; the load shows whether the machine was quiet."""
    import torch

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores, CPU, gloo, one thread a rank",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_1min_before": round(os.getloadavg()[0], 2),
    }


def run_world(script: Path, *args: str, num_ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run a script on fresh processes, as torchrun does, and return the line of JSON that each rank wrote.

    torch's own launcher is left out because its agent polls on one of the cores that are measured. This process holds
    the store at which the ranks meet, on a port that the system chooses.

    Args:
        script: Runs in its own folder.
        args: Of the script.
        num_ranks: Processes.
        timeout_s: After which the benchmark ends.
    """
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    world = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script.name, *args],
            cwd=script.parent,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        results = []
        for process in ranks:
            output, errors = process.communicate(timeout=timeout_s)
            if process.returncode:
                fail(f"{script.name} ended with exit code {process.returncode}\n{errors.rstrip()}")
            results.append(json.loads(output))
        return results
    except subprocess.TimeoutExpired:
        fail(f"{script.name} did not end within {timeout_s:g} s")
        raise
    finally:
        for process in ranks:
            process.kill()
            process.wait()
