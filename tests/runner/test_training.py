"""The whole loop on real ranks: batches, models, skipping, stopping, and what is left behind."""

from __future__ import annotations

import json

import pytest
import torch
from support.training import MANIFEST, losses, start, write

from composer3d import checkpoint
from composer3d.errors import LossError, RankError
from composer3d.runner.objective.loss_functions import token_loss
from composer3d.runner.reporting.metrics import read_metrics


def test_the_last_checkpoints_are_kept(tmp_path):
    start(write(tmp_path), 2, "train.steps=5", "checkpoint.every=1", "checkpoint.keep=2")
    folder = tmp_path / "out" / "checkpoints"
    assert sorted(found.name for found in folder.iterdir()) == ["latest", "step-4", "step-5"]


SPOILED = (
    MANIFEST
    + """
[stability]
on_nonfinite = "skip"
"""
)


def spoil(tmp_path, text):
    """Make a run whose data give a model that is not finite at its third sample in all."""
    (tmp_path / "spoiled_model.py").write_text(
        "import torch\n"
        "from composer3d.models import llama\n"
        "class Spoiled(torch.nn.Module):\n"
        "    def __init__(self, vocab_size):\n"
        "        super().__init__()\n"
        "        self.inner = llama(dim=32, num_layers=2, num_heads=2, vocab_size=vocab_size)\n"
        "        self.calls = 0\n"
        "    def forward(self, tokens):\n"
        "        self.calls += self.training\n"
        "        bad = self.calls == 3 and int(__import__('os').environ['RANK']) == 0\n"
        "        return self.inner(tokens) * (float('nan') if bad else 1.0)\n"
        "def build(vocab_size): return Spoiled(vocab_size)\n"
    )
    return write(
        tmp_path,
        text.replace(
            "model.args = { dim = 32, num_layers = 2, num_heads = 2, dropout = 0.1 }", 'model = "spoiled_model:build"'
        ),
    )


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path):
    path = spoil(tmp_path, SPOILED)
    assert start(path, 2, "train.steps=4", "train.microbatch=4")["status"] == "finished"
    rows = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1]
    assert rows[2]["loss"] is None and rows[3]["loss"] > 0


def test_a_step_that_is_not_finite_stops_the_run(tmp_path):
    path = spoil(tmp_path, SPOILED.replace('"skip"', '"stop"'))
    message = r"StabilityError: step 3: the loss is not finite \(loss nan, gradient norm nan\); lower optimizer.lr"
    with pytest.raises(RankError, match=message):
        start(path, 2, "train.steps=4", "train.microbatch=4")


def test_a_signal_to_one_rank_ends_all_after_a_step_with_a_checkpoint(tmp_path):
    path = spoil(tmp_path, SPOILED)
    model = tmp_path / "spoiled_model.py"
    text = model.read_text().replace("bad = ", "self.signal()\n        bad = ")
    send = (
        "    def signal(self):\n        import os, signal\n        if self.calls == 2 and os.environ['RANK'] == '1':\n"
    )
    send += "            os.kill(os.getpid(), signal.SIGTERM)\n"
    model.write_text(text.replace("def build", send + "def build"))
    outcome = start(path, 2, "train.steps=4", "train.microbatch=4")
    assert (outcome["status"], outcome["step"]) == ("preempted", 2)
    assert checkpoint.latest(tmp_path / "out" / "checkpoints").name == "step-2"
    assert len(losses(tmp_path / "out")) == 2


def test_a_signal_in_an_evaluation_ends_it_between_two_batches(tmp_path):
    (tmp_path / "signalled_metric.py").write_text(
        "import os, signal\ncalls = 0\n"
        "def figure(output, target):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 3 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert calls < 5, 'the evaluation goes on'\n"
        "    return output.sum() * 0, 1\n"
    )
    path = write(tmp_path, MANIFEST.replace(", dropout = 0.1", ""))
    evaluation = '{every=2, batches=50, metrics={figure="signalled_metric:figure"}}'
    told = ("data.evaluation_fraction=0.5", f"evaluation={evaluation}", "train.steps=6", "train.global_batch=4")
    outcome = start(path, 2, *told)
    assert (outcome["status"], outcome["step"]) == ("preempted", 2)
    assert checkpoint.latest(tmp_path / "out" / "checkpoints").name == "step-2"
    rows = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert len(rows) == 2 and not any(key.startswith("evaluation") for key in rows[-1])


def test_the_batch_grows_and_is_cut_alike_in_every_layout(tmp_path):
    path = write(tmp_path, MANIFEST.replace(", dropout = 0.1", ""))
    ramp = ("train.batch_ramp={start=4, step=4, every=2}", "train.global_batch=12", "train.steps=5")
    start(path, 2, *ramp)
    start(path, 1, *ramp, output=tmp_path / "one")
    rows = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert [row["tokens"] for row in rows] == [64, 64, 128, 128, 192]
    assert [row["loss"] for row in rows] == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_a_batch_that_grows_by_samples_is_resumed_to_the_bit(tmp_path):
    path = write(tmp_path, MANIFEST.replace(", dropout = 0.1", ""))
    ramp = ("train.batch_ramp={start=4, step=4, samples=20}", "train.global_batch=12", "lr_schedule.use=constant")
    start(path, 1, *ramp, "train.steps=6", output=tmp_path / "whole")
    start(path, 1, *ramp, "train.steps=3")
    start(path, 1, *ramp, "train.steps=6")
    rows = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    # 0, 4 and 8 sequences lie before the steps of 4, which are given 10; 12 before that of 8; 20 before the next one.
    assert [row["tokens"] // 16 for row in rows] == [4, 4, 4, 8, 12, 12]
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


OBJECT_MODEL = """
import torch
from collections import namedtuple
Output = namedtuple("Output", "logits")
class Model(torch.nn.Module):
    def __init__(self, vocab_size, max_seq_len):
        super().__init__()
        self.tok = torch.nn.Embedding(vocab_size, 8)
        self.place = torch.nn.Embedding(max_seq_len, 8)
        self.unused = torch.nn.Linear(3, 3)
        self.out = torch.nn.Linear(8, vocab_size)
    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])
        return Output(self.out(self.tok(tokens) + self.place(places)) + 0.0)
def build(vocab_size, max_seq_len):
    return Model(vocab_size, max_seq_len)
"""


@pytest.mark.parametrize("built", ["deferred", "host"])
def test_any_model_with_logits_is_trained_and_parameters_without_gradient_are_left_alone(tmp_path, built):
    """Its sizes come from the data."""
    (tmp_path / "object_model.py").write_text(OBJECT_MODEL)
    text = MANIFEST.replace("model.args = { dim = 32, num_layers = 2, num_heads = 2, dropout = 0.1 }", "")
    path = write(tmp_path, text.replace("composer3d = 1", 'composer3d = 1\nmodel = "object_model:build"'))
    table = ("train.steps=3", f"model.build={built}")
    start(path, 2, *table)
    start(path, 1, *table, output=tmp_path / "one")
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    contents = checkpoint.contents(tmp_path / "out" / "checkpoints" / "step-3")
    assert contents["model/tok.weight"].shape == (32, 8) and contents["model/place.weight"].shape == (16, 8)
    assert "optimizer/tok.weight/exp_avg" in contents and "optimizer/unused.weight/exp_avg" not in contents


def test_an_output_in_which_no_gradient_would_be_found_is_refused(tmp_path):
    hidden = OBJECT_MODEL.replace('namedtuple("Output", "logits")', "lambda logits: SimpleNamespace(logits=logits)")
    (tmp_path / "hidden_model.py").write_text(f"from types import SimpleNamespace\n{hidden}")
    text = MANIFEST.replace("model.args = { dim = 32, num_layers = 2, num_heads = 2, dropout = 0.1 }", "")
    path = write(tmp_path, text.replace("composer3d = 1", 'composer3d = 1\nmodel = "hidden_model:build"'))
    message = "LossError: the model returns its logits inside a SimpleNamespace, which torch cannot look into, so data"
    with pytest.raises(RankError, match=message):
        start(path, 1, "train.steps=1")


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ((torch.zeros(2, 3, 4), None), "tuple"),
        (torch.zeros(()), r"a tensor of shape \[\]"),
        ({"hidden": torch.zeros(2, 3, 4)}, "dict"),
    ],
)
def test_an_output_without_logits_is_refused(output, kind):
    with pytest.raises(LossError, match=rf"^the model returns {kind}, and the loss of a run takes logits \[batch, seq"):
        token_loss(output, torch.zeros(2, 3, dtype=torch.long))


def test_the_run_notes_what_it_was(tmp_path):
    start(write(tmp_path), 1, "train.steps=1")
    noted = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert noted["data"]["kind"] == "synthetic" and noted["world_size"] == 1
    # The distribution of torch need not name the build that torch names.
    assert noted["packages"]["torch"].partition("+")[0] == noted["torch"].partition("+")[0]
    assert "steps = 1" in (tmp_path / "out" / "manifest.toml").read_text()
