"""Going on: to the last bit, in another world, and not with a changed run."""

from __future__ import annotations

import re
import shutil

import pytest
import torch.distributed as dist
from support.training import MANIFEST, losses, start, write

from composer3d import checkpoint
from composer3d.errors import CheckpointError, RankError
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.runner.resume import choose_checkpoint
from composer3d.testing import run_ranks


def test_a_run_that_was_cut_in_two_is_the_same_to_the_last_bit(tmp_path):
    path = write(tmp_path, MANIFEST + "[ema]\ndecay = 0.9\n[evaluation]\nevery = 6\nbatches = 2\n")
    start(path, 2, output=tmp_path / "whole")
    assert start(path, 2, "train.steps=6")["step"] == 6
    again = start(path, 2)
    assert again["status"] == "finished" and again["step"] == 12
    whole, parts = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "out"))
    assert [row["step"] for row in parts] == list(range(1, 13))
    for key in ("loss", "grad_norm", "lr", "tokens", "evaluation_loss"):
        assert [row.get(key) for row in whole] == [row.get(key) for row in parts]
    assert whole[0]["tokens"] == 8 * 16


def test_another_world_goes_on_with_the_same_steps(tmp_path):
    path = write(
        tmp_path, MANIFEST.replace(", dropout = 0.1", "") + "[ema]\ndecay = 0.9\n[evaluation]\nevery = 6\nbatches = 2\n"
    )
    start(path, 2, "train.steps=6", output=tmp_path / "whole")
    start(path, 2, "train.steps=3")
    saved = checkpoint.latest(tmp_path / "out" / "checkpoints")
    reference = list(read_metrics(tmp_path / "whole" / "metrics.jsonl"))
    for world_size in (1, 4):
        output = tmp_path / f"world-{world_size}"
        start(path, world_size, "train.steps=6", resume=str(saved), output=output)
        rows = list(read_metrics(output / "metrics.jsonl"))
        assert [row["step"] for row in rows] == [4, 5, 6]
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in reference[3:]], rel=1e-6)
        assert rows[-1]["evaluation_loss"] == pytest.approx(reference[-1]["evaluation_loss"], rel=1e-6)


def test_starting_anew_moves_what_was_there_aside(tmp_path):
    path = write(tmp_path)
    start(path, 1, "train.steps=2", "checkpoint.every=1")
    first = losses(tmp_path / "out")
    start(path, 1, "train.steps=1", resume="never")
    assert losses(tmp_path / "out") == first[:1]
    aside = tmp_path / "out" / "previous-1"
    assert losses(aside) == first
    assert sorted(found.name for found in (aside / "checkpoints").iterdir()) == ["step-1", "step-2"]
    assert checkpoint.latest(tmp_path / "out" / "checkpoints").name == "step-1"


def test_rows_after_the_checkpoint_are_computed_again(tmp_path):
    path = write(tmp_path)
    start(path, 1, "train.steps=2")
    metrics = tmp_path / "out" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    start(path, 1, "train.steps=3")
    assert [row["step"] for row in read_metrics(metrics)] == [1, 2, 3]
    assert losses(tmp_path / "out")[2] != 1.0


def test_a_longer_run_says_that_its_learning_rates_are_others(tmp_path, capfd):
    def going_on(*overrides):
        capfd.readouterr()
        start(path, 1, *overrides, silent=False)
        return capfd.readouterr().err

    linear = 'lr_schedule = { use = "linear", warmup = 0, min_ratio = 0.0 }'
    path = write(tmp_path, MANIFEST.replace('lr_schedule.use = "constant"', linear))
    start(path, 1, "train.steps=2")
    assert (
        "train.steps was 2 and is 8, so the learning-rate schedule is another one: step 3 takes 0.75 of optimizer.lr, "
        "and would have taken 0\n"
    ) in going_on("train.steps=8", "checkpoint.every=3")
    # The last checkpoint is of this run's own length, and a constant rate is the same for any.
    assert "schedule" not in going_on("train.steps=8")
    path = write(tmp_path, MANIFEST)
    start(path, 1, "train.steps=2", resume="never")
    assert "schedule" not in going_on("train.steps=3")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one step, which no test changes."""
    path = write(tmp_path_factory.mktemp("finished"))
    start(path, 1, "train.steps=1")
    return path


def test_a_finished_run_stays_as_it_is(finished):
    before = (finished.parent / "out" / "metrics.jsonl").read_bytes()
    assert start(finished, 1, "train.steps=1")["status"] == "already finished"
    assert (finished.parent / "out" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.args.dim=64", "of another run: model.args.dim was 32 and is 64; go on with the manifest as it was, or"),
        ("optimizer.lr=0.5", "of another run: optimizer.lr was 0.01 and is 0.5; go on with the manifest as it was, or"),
        ("data.seq_len=8", "data.seq_len was 16 and is 8; go on with the manifest as it was, or start anew"),
        (
            "train.global_batch=4",
            "its 1 steps took 8 sequences, and the first 1 steps of this run would take 4: the global batch is another",
        ),
    ],
)
def test_a_changed_run_is_not_gone_on_with(finished, override, message):
    with pytest.raises(RankError, match=f"CheckpointError: .*/step-1: .*{re.escape(message)}"):
        start(finished, 1, "train.steps=2", override)


def test_a_path_without_a_checkpoint_is_refused(finished):
    with pytest.raises(RankError, match="CheckpointError: --resume /nowhere: there is no complete checkpoint here"):
        start(finished, 1, "train.steps=2", resume="/nowhere")


def chosen(folders):
    """Choose a checkpoint, each rank in a folder of its own; return its name and steps, or what is said."""
    from types import SimpleNamespace

    rank = dist.get_rank()
    try:
        found = choose_checkpoint(SimpleNamespace(context=SimpleNamespace(rank=rank)), folders[rank], "auto")
    except CheckpointError as error:
        return str(error)
    return found.path.name, found.num_steps


def test_the_first_rank_reads_for_all(finished, tmp_path):
    out = finished.parent / "out"
    assert run_ranks(chosen, 2, [out, tmp_path / "not_here"]) == [("step-1", 1)] * 2
    shutil.copytree(out, tmp_path / "damaged")
    (tmp_path / "damaged" / "checkpoints" / "step-1" / "state.json").write_text("{}")
    first, second = run_ranks(chosen, 2, [tmp_path / "damaged", out])
    assert first == second and "state.json" in first
