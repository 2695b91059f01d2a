"""What answers before a run is started imports nothing that only a run needs: each family is 5 to 20 ms of CPU time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Of packages of ours, which a plan needs a name or two of, the module that takes the others with it.
FAMILIES = (
    "jinja2",
    "xxhash",
    "composer3d.checkpoint.loading",
    "composer3d.checkpoint.reader",
    "composer3d.checkpoint.saving",
    "composer3d.composition.replica_groups",
    "composer3d.observation.flight_recorder",
    "composer3d.observation.hang_report",
    "composer3d.replicas.quorum_client",
    "composer3d.replicas.quorum_server",
    "composer3d.runner.data.chats",
    "composer3d.runner.data.loader",
    "composer3d.runner.data.text",
    "composer3d.runner.launching.launcher",
    "composer3d.runner.reporting",
    "composer3d.runner.trainer",
    "composer3d.runner.weights.merged_weights",
    "composer3d.runner.weights.weight_export",
    "composer3d.testing",
    "composer3d.verification",
)
# Of plugins that the manifest does not name; `suggest` imports them all, to know which layouts they offer.
OF_PLUGINS = ("composer3d.communication.block_codecs", "composer3d.propagation.sequences")
MANIFEST = """
composer3d = 1
[mesh]
pp = 2
dp_shard = 2
tp = 2
[model]
use = "composer3d.models:llama"
blocks = "layers.*"
[model.args]
dim = 32
num_layers = 2
num_heads = 4
vocab_size = 256
[data]
use = "synthetic"
seq_len = 8
[train]
steps = 1
global_batch = 8
microbatch = 1
[sharding.fsdp2]
[sharding.tensor_parallel]
[scheduling.pipeline]
[precision.mixed]
"""
PROGRAM = """
import sys
from composer3d.cli import main
code = main(sys.argv[1:])
print("imported:", *sys.modules, file=sys.stderr)
sys.exit(code)
"""


def imported(tmp_path, program, *words):
    """Return the modules that a process has at its end, which are not those of its children."""
    environment = {**os.environ, "COMPOSER3D_TRACES": "off"}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    told, _, names = done.stderr.rpartition("imported: ")
    assert done.returncode == 0, told
    return names.split()


@pytest.mark.parametrize(
    ("words", "needs", "families"),
    [
        (("plan", "--json"), "composer3d.planning.tracing.rank_tracer", FAMILIES + OF_PLUGINS),
        (("check",), "composer3d.composition.preparing", FAMILIES + OF_PLUGINS),
        (("suggest", "--world-size", "4", "--json"), "composer3d.planning.suggesting.suggest", FAMILIES),
    ],
    ids=("plan", "check", "suggest"),
)
def test_nothing_is_imported_that_only_a_run_needs(words, needs, families, tmp_path):
    (tmp_path / "run.toml").write_text(MANIFEST)
    names = imported(tmp_path, PROGRAM, *words, "run.toml")
    assert needs in names
    assert [name for name in names if f"{name}.".startswith(tuple(f"{family}." for family in families))] == []


def test_what_saves_and_loads_is_imported_before_a_run(tmp_path):
    # A broken installation is seen when the run begins, and not at its first checkpoint.
    program = "import composer3d, sys; composer3d.compose; print('imported:', *sys.modules, file=sys.stderr)"
    assert {"xxhash", "composer3d.checkpoint.saving", "composer3d.checkpoint.loading"} <= {*imported(tmp_path, program)}
