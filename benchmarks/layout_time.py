"""Seconds to lay out Llama-3-70B on 512 imagined ranks: pp = 4, dp_shard = 16, tp = 8, all on meta.

layout: for one rank of every stage, everything that compose does before weights: the model from its factory, every
plugin's choice on the whole of it, the mesh, and every transform applied to the rank's part. One fresh process a rank;
what importing torch costs is not in it, and the first use of everything else is.
check: `composer3d check --json` of the same manifest, the whole process.
What is limited is CPU time, which is about the time that passes on a machine that does nothing else.

Usage: python benchmarks/layout_time.py [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import child, children_cpu_s, conditions, note, say, say_rows

WORLD_SIZE, STAGE_SIZE = 512, 128
LAYOUT_LIMIT_S, CHECK_LIMIT_S, TIMEOUT_S = 5.0, 15.0, 120.0
MANIFEST = """\
composer3d = 1
[mesh]
pp = 4
dp_shard = 16
tp = 8
gpus_per_node = 8
[model]
use = "composer3d.models:llama"
blocks = "layers.*"
[model.args]
dim = 8192
num_layers = 80
num_heads = 64
num_kv_heads = 8
vocab_size = 128256
[data]
use = "synthetic"
seq_len = 8192
[train]
steps = 10
global_batch = 512
microbatch = 1
[sharding.fsdp2]
[sharding.tensor_parallel]
sequence_parallel = true
[scheduling.pipeline]
schedule = "1F1B"
[scheduling.activation_checkpoint]
[precision.mixed]
"""


def lay_out(path: Path, rank: int) -> dict[str, Any]:
    """Lay out one rank in this process; return its seconds and what it holds."""
    import torch

    from composer3d.checking.rules import find_factory
    from composer3d.composition.assembling import apply_transforms, build_mesh
    from composer3d.composition.preparing import prepare
    from composer3d.errors import ManifestError
    from composer3d.manifest import load_manifest
    from composer3d.runner.runner_tables import TABLES
    from composer3d.testing import fake_world

    with fake_world(WORLD_SIZE, rank=rank):
        started, cpu_started = time.perf_counter(), time.process_time()
        manifest = load_manifest(path, tables=TABLES)
        factory, problems = find_factory(manifest)
        if factory is None:
            raise ManifestError(problems)
        made = factory.build()
        prepared = prepare(made, manifest, world_size=WORLD_SIZE, rank=rank, device=torch.device("cpu"), purpose="plan")
        if prepared.problems:
            raise ManifestError(prepared.problems)
        build_mesh(prepared)
        apply_transforms(prepared)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        own = sum(parameter.to_local().numel() for _, parameter in prepared.context.named_parameters())
    return {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "parameters": own}


def measure() -> list[dict[str, Any]]:
    """Return a row for the layout of a rank of every stage, and one for the check."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama3-70b.toml"
        path.write_text(MANIFEST)
        # The second rank of a stage's second node, and so on: none of them is the first of anything.
        for stage in range(WORLD_SIZE // STAGE_SIZE):
            rank = stage * STAGE_SIZE + 9 * stage
            command = (sys.executable, __file__, "--rank", str(rank), "--manifest", str(path))
            found = json.loads(child(*command, timeout_s=TIMEOUT_S))
            rows.append({"name": f"layout, stage {stage}", "rank": rank, **found, "budget_s": LAYOUT_LIMIT_S})
            note(f"{rows[-1]['name']}: {found['seconds']} s")
        started, cpu_started = time.monotonic(), children_cpu_s()
        command = (sys.executable, "-m", "composer3d", "check", str(path), "--world-size", str(WORLD_SIZE), "--json")
        child(*command, timeout_s=TIMEOUT_S)
        seconds, cpu_s = time.monotonic() - started, children_cpu_s() - cpu_started
        rows.append(
            {"name": "check", "seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "budget_s": CHECK_LIMIT_S}
        )
    return rows


def main() -> int:
    """Read the command line, measure, print; 1 if a row is above its budget."""
    parser = argparse.ArgumentParser(description="Time the layout of a large model on 512 imagined ranks.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--manifest", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        say(json.dumps(lay_out(arguments.manifest, arguments.rank)))
        return 0
    stated = conditions()
    rows = measure()
    say_rows(rows, stated, as_json=arguments.json)
    return 0 if all(row["cpu_s"] <= row["budget_s"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
