"""verify of a mixture of experts: bytes that routing decides are compared as the sum of all ranks."""

from __future__ import annotations

import composer3d
from composer3d.processes.forking import limit_ranks

MANIFEST = """\
composer3d = 1
[mesh]
dp_shard = 2
ep = 2
[model]
use = "support.mixtures:shipped"
args = { balance_loss = 0.1, z_loss = 0.01, bias_rate = 0.01 }
[data]
use = "synthetic"
seq_len = 6
vocab_size = 11
[train]
steps = 2
global_batch = 4
microbatch = 1
[sharding.fsdp2]
[sharding.expert_parallel]
"""


def test_the_shipped_mixture_is_proven_with_its_auxiliary_loss(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST)
    with limit_ranks(2):
        found = composer3d.verify(path, steps=1)
    assert found.ok, found.to_json()
    (exchanged,) = [row for row in found.to_json()["collectives"] if (row["op"], row["axis"]) == ("all_to_all", "ep")]
    layers, microbatches, ranks = 2, 2, 2
    assert exchanged["count"] == exchanged["expected"] == 5 * layers * microbatches
    rows = 4 * 6 * 2 * 8 * 8  # two experts of each of 6 tokens, 8 wide, in float64: forth and back, and their gradients
    assert exchanged["bytes"] == exchanged["expected_bytes"] == layers * microbatches * ranks * (rows + 4 * 8)
