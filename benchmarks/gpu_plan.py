"""Plans beside runs on one GPU: bytes at the peak, and seconds a step.

Each case is a manifest of a Llama-shaped model (four blocks of an 8e9 one) or of a mixture of experts at sequence 4096.
It is planned with `--hardware`, then run by `composer3d run`; `throughput` reports the peak of the device's memory.

peak: the most bytes of tensors on the device since the run began (`torch.cuda.max_memory_allocated`), beside the plan's
    peak; error: planned over measured, less 1; band: whether the measured peak lies within the plan's.
step: the median of the steps after the warm-up, beside the plan's, which assumes a machine of the hardware file.

Where there is no CUDA device every case is stated as skipped; so is what is not begun within `--limit-s`. A case that
fails is stated as failed, and the rest goes on. `--tiny` runs and plans small sizes on whatever there is: it tests the
script, and has no memory of a device to compare.
Usage: python benchmarks/gpu_plan.py [--cases bf16 recompute] [--hardware h200] [--steps 12] [--json]
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import conditions, fail, note, say

NUM_WARMUP, TIMEOUT_S, GIB = 4, 400.0, 2**30
LLAMA = "dim = 4096, num_layers = 4, num_heads = 32, num_kv_heads = 8, ffn_dim = 14336, vocab_size = 32768"
MOE = (
    "dim = 2048, num_layers = 4, num_heads = 16, num_kv_heads = 4, ffn_dim = 1408, vocab_size = 32768, "
    "num_experts = 16, top_k = 4"
)
TINY_LLAMA = "dim = 64, num_layers = 2, num_heads = 2, vocab_size = 256"
TINY_MOE = f"{TINY_LLAMA}, num_experts = 4, top_k = 2"
FSDP, BF16, COMPILE = "[sharding.fsdp2]\n", "[precision.mixed]\n", "[scheduling.compile]\n"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is planned.

    Args:
        tables: Of its plugins.
        is_mixture: The model has experts.
    """

    tables: str
    is_mixture: bool = False


CASES = {
    "float32": Case(tables=FSDP),
    "bf16": Case(tables=FSDP + BF16),
    "ddp": Case(tables="[sharding.ddp]\n" + BF16),
    "recompute": Case(tables=FSDP + BF16 + "[scheduling.activation_checkpoint]\n"),
    "activation_offload": Case(tables=FSDP + BF16 + "[scheduling.activation_offload]\n"),
    "cpu_offload": Case(tables=FSDP + BF16 + "[sharding.cpu_offload]\n"),
    "low_bit": Case(tables=FSDP + BF16 + "[precision.low_bit_optimizer]\n"),
    "qlora": Case(tables=FSDP + BF16 + "[precision.qlora]\n"),
    "mixture": Case(tables=FSDP + BF16, is_mixture=True),
    "compile": Case(tables=FSDP + BF16 + COMPILE),
    "float8": Case(tables=FSDP + BF16 + COMPILE + "[precision.float8]\n"),
}


def manifest_of(case: Case, arguments: argparse.Namespace, folder: Path) -> str:
    """Return a case's manifest, whose run writes below a folder."""
    import torch

    if arguments.tiny:
        model, seq_len = (TINY_MOE if case.is_mixture else TINY_LLAMA), 64
    else:
        model, seq_len = (MOE if case.is_mixture else LLAMA), 4096
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"""composer3d = 1
[run]
device = "{device}"
output = {json.dumps(str(folder / "out"))}
[model]
use = "composer3d.models:{"moe" if case.is_mixture else "llama"}"
args = {{ {model} }}
[data]
use = "synthetic"
seq_len = {seq_len}
[train]
steps = {NUM_WARMUP + arguments.steps}
global_batch = {arguments.batch}
microbatch = {arguments.batch}
[mesh]
dp_shard = 1
[profiling.throughput]
count_step = 0
{case.tables}"""


def command(*arguments: str) -> str:
    """Run composer3d; return what it printed.

    Raises:
        RuntimeError: It ended with another exit code than 0, or not in time.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "composer3d", *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=os.environ | {"NO_COLOR": "1"},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{arguments[0]} took longer than {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise RuntimeError(f"{arguments[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def row(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan and run a case."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / f"{name}.toml"
        path.write_text(manifest_of(CASES[name], arguments, folder))
        planned = json.loads(command("plan", str(path), "--hardware", arguments.hardware, "--json"))
        command("run", str(path))
        metrics = [json.loads(line) for line in next(folder.rglob("metrics.jsonl")).read_text().splitlines()]
    steps = [each for each in metrics if "step_time_s" in each]
    memory, band = planned["ranks"][0]["memory"]["peak"], planned["ranks"][0]["memory_bands"]["peak"]
    result = {
        "case": name,
        "planned_peak_gib": round(memory / GIB, 3),
        "planned_step_s": round(planned["time"]["step_s"]["value"], 4),
        "step_s": round(statistics.median(each["step_time_s"] for each in steps[NUM_WARMUP:]), 4),
    }
    result["step_error"] = round(result["planned_step_s"] / result["step_s"] - 1, 4)
    peak_gib = steps[-1].get("peak_device_gib")
    if peak_gib is not None:
        result |= {
            "peak_gib": round(peak_gib, 3),
            "peak_error": round(memory / GIB / peak_gib - 1, 4),
            "in_band": bool(band[0] <= peak_gib * GIB <= band[1]),
        }
    return result


def line(each: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "case" in each and "step_s" not in each:
        return f"{each['case']:<20} {each.get('skipped') or each.get('failed')}"
    memory = ""
    if "peak_gib" in each:
        within = "within" if each["in_band"] else "outside of"
        memory = f"peak {each['peak_gib']:.2f} GiB, planned {each['planned_peak_gib']:.2f} "
        memory += f"({100 * each['peak_error']:+.1f} %, {within} its band)  "
    time_s = f"step {each['step_s']:.3f} s, planned {each['planned_step_s']:.3f} ({100 * each['step_error']:+.1f} %)"
    return f"{each['case']:<20} {memory}{time_s}"


def main() -> None:
    """Compare what can be compared here, and state what was skipped."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--hardware", default="h200", help="whose times are planned; default h200")
    parser.add_argument("--steps", type=int, default=12, help="after the warm-up")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="no case is begun after so many seconds")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for name in arguments.cases:
        reason = None if arguments.tiny or torch.cuda.is_available() else "there is no CUDA device"
        if time.monotonic() - began >= arguments.limit_s:
            reason = f"{arguments.limit_s:g} s were over"
        if reason is not None:
            rows.append({"case": name, "skipped": f"skipped: {reason}"})
        else:
            try:
                rows.append(row(name, arguments))
            except (RuntimeError, StopIteration) as error:
                rows.append({"case": name, "failed": f"failed: {error}"})
        note(line(rows[-1]))
    if arguments.json:
        on = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if torch.cuda.is_available() else {}
        say(json.dumps({"benchmark": "gpu_plan", "conditions": conditions() | on, "rows": rows}, indent=1))
    else:
        for each in rows:
            say(line(each))
    if any("failed" in each for each in rows):
        fail("some cases failed")


if __name__ == "__main__":
    main()
