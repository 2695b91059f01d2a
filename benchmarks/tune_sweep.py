"""What `composer3d tune` picks against a full sweep of what it chose from, on this machine's cores.

The machine is calibrated once. Of each manifest `tune` picks a layout; then all layouts that were proposed to it are
swept: started anew, and run in turns of some steps, all but one held meanwhile. The fastest is the one of the least
figure, for which each turn's medians are taken relative to their mean: what the machine does faster or slower from turn
to turn is in all. It fails where the pick's figure is more than 3 % above that.

Usage: python benchmarks/tune_sweep.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import child, conditions, fail, note, say_rows

from composer3d.planning.tuning.halving import paired
from composer3d.planning.tuning.trial import Measured, measure_in_turns

LIMIT = 0.03  # by which a step of the pick may be longer than one of the fastest layout
TURNS, STEPS = 10, 4  # of every layout: 40 steps
MINUTES = "0.5"  # of the calibration
TIMEOUT_S = 600.0
_HEAD = """composer3d = 1
run.device = "cpu"
[model]
use = "composer3d.models:llama"
args = { @MODEL@ }
[data]
use = "synthetic"
seq_len = @SEQ_LEN@
[train]
steps = 100000
global_batch = 8
microbatch = 2
[mesh]
dp_shard = @CORES@
[sharding.fsdp2]
"""
# One whose products are most of a step, and one whose collectives and hooks are.
MANIFESTS = {
    "wide": {"MODEL": "dim = 256, num_layers = 2, num_heads = 4, vocab_size = 1024", "SEQ_LEN": "128"},
    "narrow": {"MODEL": "dim = 64, num_layers = 4, num_heads = 4, vocab_size = 256", "SEQ_LEN": "64"},
}


def measure() -> list[dict[str, Any]]:
    """Return a row for every manifest."""
    cores = min(2, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        hardware = str(Path(folder) / "here.toml")
        _composer3d("calibrate", "-o", hardware, "--nproc-per-node", str(cores), "--minutes", MINUTES)
        return [_row(name, Path(folder) / name, hardware, cores) for name in MANIFESTS]


def _row(name: str, folder: Path, hardware: str, cores: int) -> dict[str, Any]:
    """Tune a manifest, and sweep what it was chosen from."""
    folder.mkdir()
    manifest, text = folder / "model.toml", _HEAD.replace("@CORES@", str(cores))
    for key, value in MANIFESTS[name].items():
        text = text.replace(f"@{key}@", value)
    manifest.write_text(text)
    options = ("--nproc-per-node", str(cores), "--hardware", hardware, "--keep", "microbatch", "--json")
    trials = json.loads(_composer3d("tune", str(manifest), *options))["trials"]
    chosen = [trial for trial in trials if trial["measured_s"]]
    turns = measure_in_turns(
        str(manifest),
        {number: [*trial["set"], "checkpoint.final=false"] for number, trial in enumerate(chosen)},
        num_ranks=cores,
        num_steps=STEPS,
        num_turns=TURNS,
        folder=folder / "sweep",
        timeout_s=TIMEOUT_S,
    )
    timed = {}
    for number, times in turns.items():
        if isinstance(times, Measured):
            fail(f"{chosen[number]['layout']}: {times.failure}")
        timed[number] = times
    figures = paired(timed)
    for number, figure in sorted(figures.items()):
        note(f"{name}, swept: {figure:.4f} s  {chosen[number]['layout']}")
    fastest = min(figures, key=lambda number: figures[number])
    return {
        "name": name,
        "layouts": len(chosen),
        "pick": chosen[0]["layout"],
        "fastest": chosen[fastest]["layout"],
        "pick_s": round(figures[0], 4),
        "fastest_s": round(figures[fastest], 4),
        "regret": round(figures[0] / figures[fastest] - 1, 4),
    }


def _composer3d(*arguments: str) -> str:
    return child(sys.executable, "-m", "composer3d", *arguments, timeout_s=TIMEOUT_S)


def main() -> int:
    """Read the command line, measure, print; 1 where a pick is too slow."""
    parser = argparse.ArgumentParser(description="Compare what tune picks with a full sweep.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    stated = conditions()
    rows = measure()
    say_rows(rows, stated, as_json=arguments.json)
    return 0 if all(row["regret"] <= LIMIT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
