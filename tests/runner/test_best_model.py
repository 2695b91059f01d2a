"""Evaluations that are compared: the best checkpoint is kept, and a run without improvement ends early."""

from __future__ import annotations

import math

import pytest
from support.training import start, write

from composer3d.errors import ManifestError
from composer3d.manifest import load_manifest
from composer3d.runner import TABLES
from composer3d.runner.evaluating.best_model import BestModel
from composer3d.runner.evaluating.evaluation_table import EvaluationTable
from composer3d.runner.reporting.metrics import read_metrics


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({}, (3.0, 2.0, 2.0, 2.5), [True, True, False, False]),
        ({"goal": "highest"}, (3.0, 2.0, 4.0, 4.5), [True, False, True, True]),
        ({"min_improvement": 0.5}, (3.0, 2.6, 2.4, 2.1), [True, False, True, False]),
        ({}, (math.nan, 3.0, math.nan, 2.0), [False, True, False, True]),
    ],
)
def test_evaluations_are_compared(options, values, expected):
    best = BestModel(EvaluationTable(every=1, best="loss", **options))
    assert [best.judge(step, {"loss": value}) for step, value in enumerate(values)] == expected


def test_another_figure_than_the_loss_is_best_where_it_is_highest():
    best = BestModel(EvaluationTable(every=1, metrics={"accuracy": "accuracy"}, best="accuracy"))
    for step, accuracy in enumerate((0.1, 0.3, 0.2)):
        best.judge(step, {"loss": 1.0, "accuracy": accuracy})
    assert (best.step, best.value) == (1, 0.3)


def test_a_resumed_run_compares_with_what_was_before():
    first = BestModel(EvaluationTable(every=1, best="loss", patience=2))
    first.judge(5, {"loss": 2.0})
    first.judge(10, {"loss": 3.0})
    second = BestModel(EvaluationTable(every=1, best="loss", patience=2))
    second.load_state_dict(first.state_dict())
    assert not second.judge(15, {"loss": 2.5}) and second.is_over and second.checkpoint == ("step-5",)


def test_a_run_without_improvement_ends_with_its_best_checkpoint_kept(tmp_path):
    options = ["evaluation.every=2", "evaluation.batches=1", 'evaluation.best="loss"', "evaluation.patience=2"]
    options += ["data.evaluation_fraction=0.1", "optimizer.lr=0.5", "train.steps=40", "checkpoint.keep=1"]
    outcome = start(write(tmp_path), 2, *options)
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    figures = {row["step"]: row["evaluation_loss"] for row in rows if "evaluation_loss" in row}
    best = min(figures, key=figures.__getitem__)
    assert outcome["status"] == "finished" and outcome["step"] == max(figures) == best + 4 < 40
    kept = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
    assert kept == {"latest", f"step-{best}", f"step-{best + 4}"}
    assert start(tmp_path / "run.toml", 2, *options)["status"] == "already finished"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'metrics = { loss = "mine:figure" }',
            "metrics.loss would replace the loss of the evaluation",
        ),
        ("patience = 2", 'patience has no effect without best; write best = "loss"'),
        ('best = "loss"', "best compares evaluations, and there is none; write every = 100"),
        ('every = 2\nbest = "accuracy"', 'best = "accuracy" is no figure of an evaluation; there is loss'),
    ],
)
def test_comparisons_that_cannot_be_are_refused(tmp_path, table, message):
    path = tmp_path / "run.toml"
    path.write_text(f"composer3d = 1\ntrain.steps = 2\n[evaluation]\n{table}\n")
    with pytest.raises(ManifestError, match=message):
        load_manifest(path, tables=TABLES)
