"""What rates are told in: tokens, or samples of a model that is given anything else; plan, run and plugins agree."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from support.training import start, write

from composer3d import units_of
from composer3d.cli import main
from composer3d.runner.reporting.metrics import read_metrics

IMAGES = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 10)

    def forward(self, x):
        return self.head(torch.relu(self.features(x)).mean((2, 3)))


class Pictures:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((3, 8, 8), index / 64), torch.tensor(index % 10)


class Texts(Pictures):
    def __getitem__(self, index):
        return torch.full((6,), index), torch.tensor(index % 10)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.head = nn.Embedding(64, 8), nn.Linear(8, 10)

    def forward(self, tokens):
        return self.head(self.tok(tokens).mean(1))
"""
MANIFEST = """
composer3d = 1
model.use = "{module}:{model}"
[data]
use = "{module}:{data}"
padding = "none"
evaluation_fraction = 0.0
[train]
steps = 2
microbatch = 4
global_batch = 8
[run]
device = "cpu"
[profiling.throughput]
"""


def planned(path, *options):
    written = StringIO()
    with redirect_stdout(written):
        code = main(["plan", str(path), "--hardware", "h100", *options])
    return code, written.getvalue()


@pytest.fixture
def manifest(tmp_path):
    def of(model, data):
        # Python imports a module of a name once.
        (tmp_path / f"{tmp_path.name}.py").write_text(IMAGES)
        return write(tmp_path, MANIFEST.format(module=tmp_path.name, model=model, data=data))

    return of


@pytest.mark.parametrize(
    ("model", "data", "unit", "size"), [("Net", "Pictures", "samples", 8), ("Reader", "Texts", "tokens", 8 * 6)]
)
def test_plan_run_and_plugin_agree(manifest, tmp_path, model, data, unit, size):
    path = manifest(model, data)
    code, text = planned(path, "--json")
    time, other = json.loads(text)["time"], "tokens" if unit == "samples" else "samples"
    assert (code, time["unit"], time[unit]) == (0, unit, size)
    assert time[f"{unit}_per_s"]["value"] == pytest.approx(size / time["step_s"]["value"])
    assert not [name for name in time if other in name]
    start(path, 1)
    for row in read_metrics(tmp_path / "out" / "metrics.jsonl"):
        assert row[unit] == size and row[f"{unit}_per_s"] == pytest.approx(size / row["step_time_s"])
        assert not [name for name in row if other in name] and f"throughput_{unit}_per_s" in row
        assert ("model_6n_tflops_per_s" in row) == (unit == "tokens")
    # What a real step executes is what was planned for it.
    counted = row["hardware_counted_tflops_per_s"] * 1e12 / row[f"throughput_{unit}_per_s"]
    assert counted * size == pytest.approx(json.loads(text)["ranks"][0]["flops"])


def test_the_screen_names_the_unit_and_a_budget_is_told_in_it(manifest, capsys):
    path = manifest("Net", "Pictures")
    code, text = planned(path, "--samples", "1e6")
    text = " ".join(text.split())
    assert code == 0 and "a step of 8 samples takes " in text and " samples/s, " in text
    assert "the run: 125,000 steps, " in text
    assert planned(path, "--tokens", "1e6")[0] == 2
    assert capsys.readouterr().err == (
        "--tokens: the model is given samples, and a run is as long as these; write --samples\n"
    )


def test_what_an_embedding_takes_is_a_token():
    tokens, pixels = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, 3, 8, 8)
    assert units_of(((tokens, pixels), {})) == ("tokens", 6)
    assert units_of({"tokens": tokens.int()}) == ("tokens", 6)
    assert units_of([pixels, tokens]) == ("samples", 4)
    assert units_of(pixels.to(torch.uint8)) == ("samples", 4)
    assert units_of((torch.ones(()), None)) == ("samples", 0)
