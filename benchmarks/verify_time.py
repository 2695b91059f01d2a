"""CPU time of `composer3d verify` of a small model with a large vocabulary: two blocks of SmolLM2-135M's shape.

The vocabulary of 49,152 made-up tokens is reduced by `verify` itself; two ranks, two steps, a checkpoint that is saved
and loaded. The goal is 60 seconds of CPU.

Usage: python benchmarks/verify_time.py [--json]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import conditions, fail, say_rows

BUDGET_S = 60.0
TIMEOUT_S = 900.0
MANIFEST = """composer3d = 1
[model]
use = "composer3d.models:llama"
[model.args]
vocab_size = 49152
dim = 576
num_layers = 2
num_heads = 9
num_kv_heads = 3
ffn_dim = 1536
tie_embeddings = true
[data]
use = "synthetic"
vocab_size = 49152
seq_len = 128
[train]
steps = 4
global_batch = 4
[mesh]
dp_shard = 2
[sharding.fsdp2]
[run]
device = "cpu"
"""


def measured() -> float:
    """Return the CPU seconds of one proof, of all its processes."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "run.toml"
        path.write_text(MANIFEST, encoding="utf-8")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "composer3d", "verify", str(path)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        fail(f"{' '.join(command)} ended with exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    stated = conditions()
    row = {"name": "verify of two blocks of SmolLM2-135M", "cpu_s": round(measured(), 1), "budget_s": BUDGET_S}
    say_rows([row], stated, as_json=arguments.json)


if __name__ == "__main__":
    main()
