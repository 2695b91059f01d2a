"""The shipped manifest of a mixture of experts, as a user starts it."""

from __future__ import annotations

import json

from composer3d.cli import main
from composer3d.processes.forking import limit_ranks


def test_the_shipped_mixture_trains_on_four_ranks(tmp_path, capfd):
    output = tmp_path / "out"
    with limit_ranks(4):
        code = main(["run", "quickstart-moe", "--set", f"run.output={output}", "--set", "train.steps=6"])
    told = capfd.readouterr()
    assert code == 0, told.err
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]
    assert all(1.0 <= row["expert_load_max"] <= 8.0 and row["auxiliary_loss"] > 0 for row in found)
