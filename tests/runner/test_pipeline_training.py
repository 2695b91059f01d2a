"""Manifest runs of a pipeline: on tokens, and on a model that takes something else."""

from __future__ import annotations

import pytest
from support.training import MANIFEST, start, write

import composer3d
from composer3d.checking.check import device_of, inspect, open_manifest
from composer3d.runner.reporting.metrics import read_metrics

VECTORS = """
import torch
from torch import nn

class Vectors:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 6, generator=generator), torch.tensor([index % 5] * 3)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, vectors):
        x = self.stem(vectors)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""
PIPELINE = """
composer3d = 1
model.use = "vector_model:Net"
data = { use = "vector_model:Vectors" }
train = { steps = 4, global_batch = 8, microbatch = 2 }
lr_schedule.use = "constant"
run.device = "cpu"
mesh.pp = 2
[scheduling.pipeline]
"""


def losses(path):
    return [row["loss"] for row in read_metrics(path.parent / "out" / "metrics.jsonl")]


def test_a_model_of_vectors_is_run_and_checked(tmp_path):
    (tmp_path / "vector_model.py").write_text(VECTORS)
    path = write(tmp_path, PIPELINE)
    inspected = open_manifest(str(path), [])
    found = inspect(inspected, world_size=2, rank=0, device=device_of(inspected.manifest))
    assert found.problems == []
    assert start(path, 2)["status"] == "finished"
    pipelined = losses(path)
    assert start(path, 1, "mesh.pp=1", resume="never")["status"] == "finished"
    assert pipelined == pytest.approx(losses(path), rel=1e-5)


def test_a_text_model_is_run_and_resumed(tmp_path):
    path = write(tmp_path, MANIFEST.replace("dropout = 0.1", "dropout = 0.0"))
    start(path, 1)
    alone = losses(path)
    pipeline = ["mesh.pp=2", 'scheduling.pipeline.schedule="1F1B"', "checkpoint.every=6"]
    start(path, 2, *pipeline, "train.steps=6", resume="never")
    assert start(path, 2, *pipeline)["step"] == 12
    assert losses(path) == pytest.approx(alone, rel=1e-4)


FROZEN = 'train.frozen=["stem", "layers.0", "layers.1"]'


def test_a_rank_whose_parameters_are_all_frozen_is_planned_run_and_resumed(tmp_path):
    (tmp_path / "vector_model.py").write_text(VECTORS)
    path = write(tmp_path, PIPELINE)
    start(path, 1, "mesh.pp=1", FROZEN)
    alone = losses(path)
    start(path, 2, FROZEN, "train.steps=2", "checkpoint.every=2", resume="never")
    assert start(path, 2, FROZEN, "checkpoint.every=2")["step"] == 4
    assert losses(path) == pytest.approx(alone, rel=1e-5)
    planned = composer3d.plan(path, overrides=[FROZEN], rank="all").to_json()["ranks"]
    first, last = sorted(planned, key=lambda row: row["rank"])
    assert first["memory"]["gradients"] == first["memory"]["optimizer"] == 0 < last["memory"]["gradients"]
    assert "receive" not in {row["op"] for row in first["collectives"]}, "no gradient comes back"


def test_a_pipeline_without_a_trained_parameter_is_refused(tmp_path):
    (tmp_path / "other_vectors.py").write_text(VECTORS)
    path = write(tmp_path, PIPELINE.replace("vector_model", "other_vectors"))
    with pytest.raises(composer3d.ManifestError) as caught:
        composer3d.plan(path, overrides=['train.frozen=["*"]'])
    assert "frozen leaves no parameter to train" in str(caught.value)
