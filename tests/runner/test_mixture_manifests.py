"""The shipped manifests of a mixture of experts, as a user starts them."""

from __future__ import annotations

import json

import pytest

from composer3d.cli import main
from composer3d.processes.forking import limit_ranks

# Ranks, and what a run says of its mesh.
MANIFESTS = {
    "quickstart-moe": (4, "pp=1 x dp_replicate=1 x dp_shard=4 x cp=1 x tp=1"),
    "quickstart-5d": (8, "pp=2 x dp_replicate=1 x dp_shard=2 x cp=2 x tp=1"),
    "quickstart-5d-tp": (8, "pp=2 x dp_replicate=1 x dp_shard=2 x cp=1 x tp=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_shipped_mixture_trains(name, tmp_path, capfd):
    output = tmp_path / "out"
    num_ranks, layout = MANIFESTS[name]
    with limit_ranks(num_ranks):
        changes = [f"run.output={output}", "train.steps=6", "data.seq_len=64", "model.args.num_layers=2"]
        code = main(["run", name, *(word for change in changes for word in ("--set", change))])
    told = capfd.readouterr()
    assert code == 0, told.err
    assert f"{layout}, 6 steps" in told.err
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]
    assert all(1.0 <= row["expert_load_max"] <= 8.0 and row["auxiliary_loss"] > 0 for row in found)


STARVED = """\
composer3d = 1
run.output = "out"
[mesh]
dp_shard = 2
ep = 2
[model]
use = "support.mixtures:starved"
[data]
use = "synthetic"
seq_len = 4
vocab_size = 11
[train]
steps = 52
global_batch = 2
[optimizer]
lr = 0.0
[sharding.fsdp2]
[sharding.expert_parallel]
"""


def test_doctor_names_experts_that_no_token_goes_to(tmp_path, monkeypatch, capfd):
    (tmp_path / "run.toml").write_text(STARVED)
    monkeypatch.chdir(tmp_path)
    with limit_ranks(2):
        assert main(["run", "run.toml"]) == 0
    assert main(["doctor", "out"]) == 0
    told = " ".join(capfd.readouterr().out.split())
    names = ", ".join(f'expert {number} of "layers.{layer}.experts"' for layer in range(2) for number in (2, 3))
    assert f"{names} had no token for 50 steps or more" in told
    found = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["experts_without_tokens"] == 4 and row["tokens_dropped"] == 0 for row in found)
    assert all(abs(row["router_entropy"] - 0.5) < 1e-6 for row in found)  # two experts of four, evenly
