from __future__ import annotations

import json
import re

import pytest
from support.models import assert_unchanged
from support.training import MANIFEST, start, write

import composer3d
from composer3d.cli import main
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.testing import count_collectives, run_ranks

# A rank that the machine holds up now and then is off by less than what the slow one computes.
FSDP, TABLE = "[sharding.fsdp2]\n", "[profiling.stragglers]\nratio = 1.5\nleast_s = 0.06\nsteps = 2\n"
LAME = MANIFEST.replace("microbatch = 2", 'microbatch = 2, loss = "support.dying_ranks:lame_loss"')


def test_gradients_equal_one_device_and_collectives_stay():
    assert_unchanged(2, FSDP, TABLE)


def test_times_travel_on_the_all_reduce_that_begins_a_step(tmp_path):
    path = tmp_path / "run.toml"

    def bytes_of(text):
        path.write_text(f"composer3d = 1\n{FSDP}{text}")

        def rank():
            import torch
            from torch import nn

            run = composer3d.compose(lambda: nn.Linear(2, 2), path, loss_fn=nn.functional.mse_loss, device="cpu")
            with run.step(0), count_collectives(run.mesh) as counted:
                run.forward_backward(torch.ones(2, 2), target=torch.ones(2, 2))
            found = [row.bytes for row in counted.rows if row.dtype is torch.int64]
            run.close()
            return found

        return run_ranks(rank, 2)[0]

    assert bytes_of("") == [8 * (3 + 5 * 2)]
    assert bytes_of(TABLE) == [8 * (3 + 6 * 2)]


def test_a_slow_rank_is_named_until_it_is_slow_no_more(tmp_path, capsys):
    path = write(tmp_path, LAME.replace("global_batch = 8", "global_batch = 6") + TABLE)
    start(path, 3, "train.steps=8")
    named = [row.get("slow_rank") for row in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    # Times come with the next step's counts, two slow steps make a slow rank, and all ranks are slow in the first one.
    assert named[0] is None and named[1] == -1 and set(named[3:6]) == {1} and named[7] == -1
    folder = tmp_path / "out" / "stragglers"
    assert [file.name for file in folder.iterdir()] == ["rank-1.jsonl"]
    rows = [json.loads(line) for line in (folder / "rank-1.jsonl").read_text().splitlines()]
    assert rows[0]["step"] in (3, 4) and rows[-1]["finding"] == ""
    text = (
        r"rank 1 \(dp_shard 1\) on (\S+) is slow: its own work takes \d+\.\d ms a step, \d+\.\d times the \d+\.\d ms "
        r"of the others of its stage; if it stays so, drain \1"
    )
    assert re.fullmatch(text, rows[0]["finding"])
    (folder / "rank-1.jsonl").write_text(json.dumps(rows[0]) + "\n")
    main(["doctor", str(tmp_path / "out")])
    assert re.search(f"since step {rows[0]['step']} {text}", " ".join(capsys.readouterr().out.split()))


def test_stages_of_a_pipeline_are_not_compared(tmp_path):
    text = LAME.replace("[sharding.fsdp2]", "[scheduling.pipeline]\n[mesh]\npp = 2").replace(", dropout = 0.1", "")
    start(write(tmp_path, text + TABLE), 2, "train.steps=4")
    rows = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert {(row["slow_rank"], row["slowest_ratio"]) for row in rows[1:]} == {(-1.0, 1.0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ratio = 1.0", "profiling.stragglers.ratio must be greater than 1.0, not 1.0"),
        ("steps = 0", "profiling.stragglers.steps must be at least 1, not 0"),
    ],
)
def test_refusals(text, message, tmp_path):
    found = composer3d.check(write(tmp_path, f"{MANIFEST}[profiling.stragglers]\n{text}\n")).problems
    assert [problem.message for problem in found] == [message]
