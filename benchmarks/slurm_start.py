"""Seconds from `sbatch` of what `launch --on slurm` writes to the first step of two ranks on two Slurm nodes.

The cluster is real, of two nodes on this machine (`tests/support/slurm_cluster.py`: root, Debian's slurm-wlm and
munge), and the run a small Llama under FSDP2. A line of metrics is the first step. Beside the seconds stand those at
which the script, the ranks' processes and their run's folder were seen, and the CPU time of both ranks until the step:
all other processes share the cores, so seconds depend on the load, and CPU time hardly does. `import torch` is timed
before and after. Several checkouts take turns.

    python benchmarks/slurm_start.py [--rounds 3] [--trees PATH ...] [--json]
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import child, conditions, fail, import_torch_s, note, say_rows

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.slurm_cluster import PROGRAMS, Cluster, running_cluster  # noqa: E402  # the tests' own

MANIFEST = """\
composer3d = 1
extends = "quickstart"
run.output = "out"
train.steps = 1
model.args.dim = 32
model.args.num_layers = 2
"""
LAUNCH = ("launch", "run.toml", "--on", "slurm", "--nodes", "2", "--gpus-per-node", "1")
PATH = os.environ["PATH"]
TIMEOUT_S = 300.0
LIMIT_S = 15.0
LOOK_S = 0.05
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trees", nargs="+", type=Path, default=[ROOT], help="checkouts that take turns")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if os.getuid() or missing:
        fail(f"a cluster needs root and Debian's slurm-wlm and munge; missing: {' '.join(missing) or 'root'}")
    stated = conditions()
    for tree in arguments.trees:
        for name in ("composer3d", "plugins"):
            compileall.compile_dir(tree / name, quiet=2)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    before = import_torch_s(1, timeout_s=TIMEOUT_S)[0]
    found = measure(arguments.trees, arguments.rounds)
    after = import_torch_s(1, timeout_s=TIMEOUT_S)[0]
    stated |= {"import_torch_s": [round(before, 1), round(after, 1)]}
    say_rows([row(tree, each) for tree, each in found.items()], stated, as_json=arguments.json)


def row(tree: Path, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of a checkout's rounds, and all of its seconds."""
    medians = {key: round(statistics.median(each[key] for each in rounds), 1) for key in rounds[0]}
    every = [round(each["seconds"], 1) for each in rounds]
    return {"name": f"first step after sbatch, {tree.name}", **medians, "every_s": every, "limit_s": LIMIT_S}


def measure(trees: list[Path], num_rounds: int) -> dict[Path, list[dict[str, float]]]:
    """Return what each checkout took, a dictionary a round."""
    found: dict[Path, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="slurm-start-") as folder:
        home = Path(folder) / "slurm"
        home.mkdir()
        with running_cluster(home) as cluster:
            for number in range(num_rounds):
                for index, tree in enumerate(trees):
                    place = Path(folder) / f"{number}-{index}"
                    place.mkdir()
                    found[tree].append(first_step(cluster, tree, place))
                    note(f"{tree}: {found[tree][-1]}")
    return found


def first_step(cluster: Cluster, tree: Path, folder: Path) -> dict[str, float]:
    """Submit a job, and return when what of it was there, in seconds after sbatch, with the ranks' CPU time."""
    (folder / "run.toml").write_text(MANIFEST)
    search = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{PATH}", "PYTHONPATH": f"{tree}:{tree / 'plugins'}"}
    cluster.environment |= search
    os.environ |= search
    script = child(sys.executable, "-m", "composer3d", *LAUNCH, timeout_s=TIMEOUT_S, cwd=folder)
    (folder / "job.sh").write_text(script)
    started, seen = time.monotonic(), dict[str, float]()
    job = cluster.said("sbatch", "--parsable", "job.sh", cwd=folder)
    seen["sbatch_s"] = time.monotonic() - started
    output, pids = folder / "out", list[int]()
    marks = {"script_s": "logs", "tasks_s": "logs/slurm-*.log", "ranks_s": "ranks/*/rank-*.progress"}
    while not (output / "metrics.jsonl").exists() or not (output / "metrics.jsonl").stat().st_size:
        now = time.monotonic() - started
        if now > TIMEOUT_S or not job:
            fail(f"no step of job {job or 'none'}\n{_logs(folder)}")
        for name, pattern in marks.items():
            if name not in seen and any(output.glob(pattern)):
                seen[name] = now
        pids = pids if len(pids) == 2 else _ranks(folder)
        time.sleep(LOOK_S)
    seen |= {"seconds": time.monotonic() - started, "cpu_s": sum(_cpu_s(pid) for pid in pids)}
    while cluster.said("squeue", "-h", "-j", job):
        time.sleep(4 * LOOK_S)
    return seen


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in [*folder.glob("*.out"), *folder.glob("out/logs/*.log")])


def _ranks(folder: Path) -> list[int]:
    """Return the processes that run a folder's manifest, without the shells that started them."""
    mark, found = f"\0run\0{folder / 'run.toml'}".encode(), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes()
            if mark in command and command.partition(b"\0")[0].rpartition(b"/")[2].startswith(b"python"):
                found.append(int(path.parent.name))
    return found


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / TICKS
    return 0.0


if __name__ == "__main__":
    main()
