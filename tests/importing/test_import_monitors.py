"""Monitors that sources name: wandb, MLflow and CSV files."""

from __future__ import annotations

import json

import pytest
from support.imported import manifest_of, translated, verdicts_of

WATCHED = {
    ("run.yaml", "axolotl"): "wandb_project: mine\nwandb_entity: team\n",
    ("recipe.yaml", "automodel"): "wandb: {project: mine, entity: team}\n",
    ("neox.yml", "neox"): '{"use_wandb": true, "wandb_project": "mine", "wandb_team": "team", "wandb_group": "ours"}',
    ("ds.json", "deepspeed"): '{"wandb": {"enabled": true, "project": "mine", "team": "team", "group": "ours"}}',
    ("flags.txt", "megatron"): "--wandb-project mine --wandb-entity team --lr 1e-3",
}


@pytest.mark.parametrize(("name", "system"), WATCHED)
def test_teams_and_groups_of_weights_and_biases_are_carried(tmp_path, name, system):
    translation = translated(tmp_path, name, WATCHED[name, system], system=system)
    expected = {"project": "mine", "entity": "team"}
    if "group" in WATCHED[name, system]:
        expected["group"] = "ours"
    assert manifest_of(translation)["profiling"]["wandb"] == expected
    told = {key: verdict for key, verdict in verdicts_of(translation).items() if "wandb" in key}
    assert set(told.values()) == {"carried"}


MLFLOW = {
    ("run.yaml", "axolotl"): "use_mlflow: true\nmlflow_tracking_uri: http://host:5000\nmlflow_experiment_name: ours\n",
    ("recipe.yaml", "automodel"): "mlflow: {tracking_uri: 'http://host:5000', experiment_name: ours}\n",
}


@pytest.mark.parametrize(("name", "system"), MLFLOW)
def test_mlflows_server_and_experiment_are_carried(tmp_path, name, system):
    translation = translated(tmp_path, name, MLFLOW[name, system], system=system)
    expected = {"tracking_uri": "http://host:5000", "experiment": "ours"}
    assert manifest_of(translation)["profiling"]["mlflow"] == expected
    assert {verdict for key, verdict in verdicts_of(translation).items() if "mlflow" in key} == {"carried"}


def test_a_trainer_that_reports_to_mlflow_does_so_here(tmp_path):
    translation = translated(
        tmp_path, "args.json", '{"report_to": ["mlflow"], "learning_rate": 1e-5}', system="trainer"
    )
    assert manifest_of(translation)["profiling"] == {"mlflow": {}}
    assert verdicts_of(translation)["report_to"] == "carried"


@pytest.mark.parametrize(
    ("names", "verdict", "to"),
    [
        (["wandb", "tensorboard"], "carried", "profiling.wandb"),
        (["comet_ml"], "missing", None),
        ("all", "changed", None),
        ("none", "equal", None),
    ],
)
def test_monitors_of_a_trainer_have_a_verdict(tmp_path, names, verdict, to):
    text = json.dumps({"report_to": names, "learning_rate": 1e-5})
    found = translated(tmp_path, "args.json", text, system="trainer").verdicts["report_to"]
    assert (found.verdict, found.to) == (verdict, to)


def test_tokens_of_text_are_no_secrets(tmp_path):
    text = "special_tokens: {pad_token: <pad>}\nhub_token: abcd1234\n"
    translation = translated(tmp_path, "run.yaml", text, system="axolotl")
    assert translation.verdicts["special_tokens.pad_token"].value == "<pad>"
    assert "abcd1234" not in json.dumps([entry.to_json() for entry in translation.verdicts.values()])


def test_a_csv_monitor_is_one_file_in_its_folder(tmp_path):
    text = '{"csv_monitor": {"enabled": true, "output_path": "logs", "job_name": "first"}}'
    translation = translated(tmp_path, "ds.json", text)
    assert manifest_of(translation)["profiling"]["csv"] == {"file": "logs/first/metrics.csv"}
    assert set(verdicts_of(translation).values()) == {"carried"}


def test_a_csv_monitor_that_is_off_means_nothing(tmp_path):
    translation = translated(tmp_path, "ds.json", '{"csv_monitor": {"enabled": false, "job_name": "first"}}')
    assert "csv" not in manifest_of(translation).get("profiling", {})
    assert set(verdicts_of(translation).values()) == {"meaningless"}
