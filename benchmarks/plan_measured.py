"""The plan's step time on this machine's cores against that of runs: `python benchmarks/plan_accuracy.py --measured`.

One rank a core: the machine is calibrated, then each manifest is planned with what was measured and run, and the median
of its steps compared. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = 0.15  # the median of the errors
_SKIPPED = 3  # of a run's first steps
_STEPS = 10
_MODEL = "args = { dim = 256, num_layers = 4, num_heads = 8, vocab_size = 2048 }"
_HEAD = f"""composer3d = 1
[model]
use = "composer3d.models:llama"
{_MODEL}
[data]
use = "synthetic"
seq_len = 256
[train]
steps = {_STEPS}
global_batch = @BATCH@
microbatch = 2
[mesh]
@AXIS@ = @CORES@
"""
# Name, axis, and its plugins' tables.
MANIFESTS = (
    ("zero 3", "dp_shard", "[sharding.fsdp2]\n"),
    ("zero 3, recomputed", "dp_shard", "[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n"),
    ("copies", "dp_replicate", "[sharding.ddp]\n"),
    ("tensors", "tp", '[sharding.tensor_parallel]\nplan = "auto"\n'),
    ("pipeline", "pp", "[scheduling.pipeline]\n"),
)


def measured_rows(cores: int | None = None) -> list[str]:
    """Calibrate, plan and run every manifest; return the table, the errors' median last.

    Args:
        cores: Ranks of every run; default: the cores that this process may use, at most 4.
    """
    cores = cores or min(4, len(os.sched_getaffinity(0)))
    rows, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        hardware = Path(folder) / "here.toml"
        _command("calibrate", "-o", str(hardware), "--nproc-per-node", str(cores))
        for name, axis, tables in MANIFESTS:
            manifest = Path(folder) / f"{name.replace(' ', '_').replace(',', '')}.toml"
            text = _HEAD.replace("@AXIS@", axis).replace("@CORES@", str(cores)).replace("@BATCH@", str(8 * cores))
            manifest.write_text(text + tables)
            plan = json.loads(_command("plan", str(manifest), "--hardware", str(hardware), "--json"))
            planned_s, run_s = plan["time"]["step_s"]["value"], _step_s(manifest, Path(folder) / manifest.stem)
            errors.append(planned_s / run_s - 1)
            rows.append(f"measured {name:<20} planned {planned_s:.3f} s  run {run_s:.3f} s  {100 * errors[-1]:+.1f} %")
    median = statistics.median(abs(error) for error in errors)
    return [*rows, f"measured median error {100 * median:.1f} %, target {100 * TARGET:.0f} %"]


def _step_s(manifest: Path, output: Path) -> float:
    _command("run", str(manifest), "--set", f"run.output={output}")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_time_s"] for row in rows[_SKIPPED:] if "step_time_s" in row)


def _command(*arguments: str) -> str:
    command = [sys.executable, "-m", "composer3d", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600.0)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}\n{done.stderr.rstrip()}")
    return done.stdout
