"""What the benchmarks share: a world of fresh processes, and the conditions under which something was measured."""

from __future__ import annotations

import compileall
import importlib.util
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

__all__ = [
    "World",
    "child",
    "children_cpu_s",
    "conditions",
    "fail",
    "import_torch_s",
    "keep_bytecode",
    "note",
    "say",
    "say_rows",
    "with_marked",
]

# glibc gives freed memory back to the system, and takes it page by page again, where it happens to be the last of the
# heap: a loop written by hand was seen to fault on 5 to 12000 pages in steps of the same process. Ranks of all worlds
# keep what they had, so that what is compared is what they do.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def say(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line of progress to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def fail(text: str) -> NoReturn:
    """End the benchmark with exit code 1 and a reason."""
    note(text)
    raise SystemExit(1)


def say_rows(rows: Iterable[Mapping[str, Any]], stated: Mapping[str, Any], *, as_json: bool) -> None:
    """Write rows a line each, or as one JSON object with the conditions and the load after them."""
    if as_json:
        after = {"load_1min_after": round(os.getloadavg()[0], 2)}
        say(json.dumps({"rows": list(rows), "conditions": {**stated, **after}}, indent=1))
        return
    for row in rows:
        say("  ".join(f"{value}" if key == "name" else f"{key} {value}" for key, value in row.items()))


def with_marked(readme: str, name: str, text: str) -> str:
    """Return a Markdown file with a text between the two marks of a name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = readme.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{text}{end}{after}"


def child(*command: str, timeout_s: float, cwd: Path | None = None) -> str:
    """Run a fresh process and return what it writes; where it fails, so does the benchmark."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, cwd=cwd)
    if done.returncode:
        fail(f"{' '.join(command)} ended with exit code {done.returncode}\n{done.stdout[:500]}{done.stderr.rstrip()}")
    return done.stdout


def children_cpu_s() -> float:
    """Return the CPU time of the processes that were started and have ended."""
    times = os.times()
    return times.children_user + times.children_system


def keep_bytecode() -> None:
    """Write the bytecode of composer3d and its plugins, as an installation does, and let children read and write it.

    Where PYTHONDONTWRITEBYTECODE is set, each process compiles a thousand files, for a second of CPU time and more.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in ("composer3d", "composer3d_plugins"):
        found = importlib.util.find_spec(name)
        for folder in (found.submodule_search_locations if found is not None else None) or ():
            compileall.compile_dir(folder, quiet=2)


def import_torch_s(num_rounds: int, *, timeout_s: float) -> tuple[float, float]:
    """Return the seconds that pass and the CPU time of a process that imports torch and nothing else.

    Args:
        num_rounds: Processes, of which the medians count.
        timeout_s: Of each.
    """
    times = []
    for _ in range(num_rounds):
        started, cpu_started = time.monotonic(), children_cpu_s()
        child(sys.executable, "-c", "import torch", timeout_s=timeout_s)
        times.append((time.monotonic() - started, children_cpu_s() - cpu_started))
    seconds, cpu_s = zip(*times, strict=True)
    return statistics.median(seconds), statistics.median(cpu_s)


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


class World:
    """A script on fresh processes, started as torchrun does, whose ranks wait for their turn before every step.

    torch's own launcher is left out because its agent polls on one of the cores that are measured. This process holds
    the store at which the ranks meet, on a port that the system chooses.

    Args:
        script: Runs in its own folder, with `turns` on its command line.
        args: Of the script.
        num_ranks: Processes.
        timeout_s: For a start or a step, after which the benchmark ends.
    """

    def __init__(self, script: Path, *args: str, num_ranks: int, timeout_s: float) -> None:
        from torch.distributed import TCPStore

        self._script, self._timeout_s = script, timeout_s
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        world = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self._store.port), "OMP_NUM_THREADS": "1"}
        world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(num_ranks)} | KEPT_MEMORY
        self._errors = tempfile.TemporaryFile("w+")
        self._ranks = [
            subprocess.Popen(
                [sys.executable, script.name, *args, "turns"],
                cwd=script.parent,
                env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def wait(self) -> list[str]:
        """Wait for a line of every rank."""
        return [self._line(rank) for rank in self._ranks]

    def _line(self, rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None, "a pipe"
        line = rank.stdout.readline() if select.select([rank.stdout], [], [], self._timeout_s)[0] else ""
        if not line:
            self._errors.seek(0)
            fail(
                f"{self._script.name} ended, or took longer than {self._timeout_s:g} s\n{self._errors.read().rstrip()}"
            )
        return line

    def turn(self) -> list[str]:
        """Let the ranks go on, and return the line that each of them then writes."""
        for rank in self._ranks:
            assert rank.stdin is not None, "a pipe"
            rank.stdin.write("\n")
            rank.stdin.flush()
        return self.wait()

    def close(self) -> None:
        """Wait for the processes to end, or end them."""
        for rank in self._ranks:
            try:
                rank.communicate(timeout=self._timeout_s if sys.exc_info()[0] is None else 0.0)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.communicate()
        self._errors.close()
