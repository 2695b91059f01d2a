"""The plan's step time on this machine's cores against that of runs: `python benchmarks/plan_accuracy.py --measured`.

One rank a core: each manifest is run, and the median of its steps compared with its plan. The machine is calibrated
before the runs and after them, and the two plans' mean counts: what it does faster or slower in these minutes is in
both. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from composer3d import plan

TARGET = 0.10  # the median of the errors
_SKIPPED = 3  # of a run's first steps
_STEPS = 10
_MINUTES = "0.6"  # of each calibration
_HEAD = f"""composer3d = 1
[model]
use = "composer3d.models:llama"
args = {{ @MODEL@ }}
[data]
use = "synthetic"
seq_len = @SEQ_LEN@
[train]
steps = {_STEPS}
global_batch = @BATCH@
microbatch = @MICROBATCH@
[mesh]
@AXIS@ = @CORES@
"""
_MODEL = "dim = 256, num_layers = 4, num_heads = 8, vocab_size = 2048"
_ZERO = "[sharding.fsdp2]\n"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is planned.

    Args:
        name: In the table.
        axis: Of the mesh, over all cores.
        tables: Of its plugins.
        model: Arguments of the model.
        seq_len: Of a sample.
        microbatch: Samples of a micro-batch.
    """

    name: str
    axis: str
    tables: str
    model: str = _MODEL
    seq_len: int = 256
    microbatch: int = 2

    def manifest(self, cores: int) -> str:
        """Return the manifest: eight samples a core."""
        texts = {"AXIS": self.axis, "CORES": cores, "BATCH": 8 * cores, "MODEL": self.model}
        texts |= {"SEQ_LEN": self.seq_len, "MICROBATCH": self.microbatch}
        head = _HEAD
        for key, text in texts.items():
            head = head.replace(f"@{key}@", str(text))
        return head + self.tables


CASES = (
    Case(name="zero 3", axis="dp_shard", tables=_ZERO),
    Case(name="zero 3, recomputed", axis="dp_shard", tables=_ZERO + "[scheduling.activation_checkpoint]\n"),
    Case(name="copies", axis="dp_replicate", tables="[sharding.ddp]\n"),
    Case(name="tensors", axis="tp", tables='[sharding.tensor_parallel]\nplan = "auto"\n'),
    Case(name="pipeline", axis="pp", tables="[scheduling.pipeline]\n"),
    # Another width, vocabulary, length, dtype and micro-batch each.
    Case(
        name="narrow, bfloat16",
        axis="dp_shard",
        tables=_ZERO + "[precision.mixed]\n",
        model="dim = 128, num_layers = 6, num_heads = 4, vocab_size = 512",
        seq_len=128,
        microbatch=4,
    ),
    Case(
        name="wide, one sample",
        axis="dp_replicate",
        tables="[sharding.ddp]\n",
        model="dim = 512, num_layers = 2, num_heads = 8, vocab_size = 1024",
        microbatch=1,
    ),
    Case(
        name="long, tied, dropout",
        axis="dp_shard",
        tables=_ZERO,
        model="dim = 192, num_layers = 3, num_heads = 3, vocab_size = 4096, tie_embeddings = true, dropout = 0.1",
        seq_len=512,
        microbatch=1,
    ),
)


def measured_rows(cores: int | None = None) -> list[str]:
    """Calibrate, plan and run every manifest; return the table, the errors' median last.

    Args:
        cores: Ranks of every run; default: the cores that this process may use, at most 4.
    """
    cores = cores or min(4, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        before = _calibrated(Path(folder) / "before.toml", cores)
        manifests, runs = [], []
        for number, case in enumerate(CASES):
            manifests.append(Path(folder) / f"case-{number}.toml")
            manifests[-1].write_text(case.manifest(cores))
            runs.append(_step_s(manifests[-1], Path(folder) / manifests[-1].stem))
        after = _calibrated(Path(folder) / "after.toml", cores)
        plans = [statistics.fmean(_planned_s(manifest, each) for each in (before, after)) for manifest in manifests]
    errors = [planned_s / run_s - 1 for planned_s, run_s in zip(plans, runs, strict=True)]
    rows = [
        f"measured {case.name:<20} planned {planned_s:.3f} s  run {run_s:.3f} s  {100 * error:+.1f} %"
        for case, planned_s, run_s, error in zip(CASES, plans, runs, errors, strict=True)
    ]
    median = statistics.median(abs(error) for error in errors)
    return [*rows, f"measured median error {100 * median:.1f} %, target {100 * TARGET:.0f} %"]


def _calibrated(hardware: Path, cores: int) -> Path:
    _command("calibrate", "-o", str(hardware), "--nproc-per-node", str(cores), "--minutes", _MINUTES)
    return hardware


def _planned_s(manifest: Path, hardware: Path) -> float:
    time = plan(manifest, hardware=str(hardware)).to_json()["time"]
    return float(time["step_s"]["value"])


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
