"""The shipped manifest of four dimensions, as a user starts it."""

from __future__ import annotations

import json

from composer3d.cli import main
from composer3d.processes.forking import limit_ranks


def test_the_shipped_manifest_trains_on_eight_ranks(tmp_path, capfd):
    output = tmp_path / "out"
    with limit_ranks(8):
        code = main(["run", "quickstart-4d", "--set", f"run.output={output}", "--set", "train.steps=6"])
    told = capfd.readouterr()
    assert code == 0, told.err
    assert "pp=2 x dp_replicate=1 x dp_shard=2 x cp=2 x tp=1, 6 steps" in told.err
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == list(range(1, 7))
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]
