"""A run of two groups on two machines as jobs start it, and the losses that it leaves."""

from __future__ import annotations

import json

STEPS = 12
MANIFEST = f"""\
composer3d = 1
extends = "quickstart"
run.output = "out"
train.steps = {STEPS}
model.args.dim = 32
model.args.num_layers = 2
checkpoint.every = 1000
mesh.replica = 2
mesh.dp_shard = 1
communication.replicas.minimum = 2
"""
TOLERANCE = 2e-6  # of float32 sums in another order


def losses(folder, output="out"):
    """Return the losses of a run by step, as far as it has come."""
    file = folder / output / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row["step"]: row["loss"] for row in rows}
