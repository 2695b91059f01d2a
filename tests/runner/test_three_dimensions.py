"""The shipped manifest of three dimensions, as a user starts it."""

from __future__ import annotations

import json

from composer3d.cli import main
from composer3d.processes.forking import limit_ranks


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_shipped_manifest_trains_on_eight_ranks_and_goes_on_on_two(tmp_path, capfd):
    output = tmp_path / "out"
    common = ["--set", f"run.output={output}", "--set", "data.seq_len=32", "--set", "evaluation.every=100"]
    with limit_ranks(8):
        code = main(["run", "quickstart-3d", *common, "--set", "train.steps=8"])
    told = capfd.readouterr()
    assert code == 0, told.err
    assert "pp=2 x dp_replicate=1 x dp_shard=2 x cp=1 x tp=2, 8 steps" in told.err
    found = rows(output)
    assert [row["step"] for row in found] == list(range(1, 9))
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]
    with limit_ranks(2):
        code = main(["run", "quickstart", *common, "--set", "train.steps=10"])
    told = capfd.readouterr()
    assert code == 0, told.err
    assert f"going on from {output}/checkpoints/step-8: " in told.err
    found = rows(output)
    assert [row["step"] for row in found] == list(range(1, 11))
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]
