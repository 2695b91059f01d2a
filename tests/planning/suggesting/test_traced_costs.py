"""Costs of layouts from the traces of a few: what they say of any model, and how far they are from a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer3d import suggest
from composer3d.errors import ComposerError
from composer3d.planning.formulas.layout_numbers import Setup
from composer3d.planning.hardware.hardware_file import load_hardware
from composer3d.planning.suggesting.given_manifest import GivenManifest
from composer3d.planning.suggesting.layout_costs import LayoutCosts

MODELS = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, dim, num_experts, index):
        super().__init__()
        self.query, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.router = nn.Linear(dim, num_experts)
        self.up = nn.Parameter(torch.empty(num_experts, dim, 4 * dim).normal_(0, 0.02))
        self.down = nn.Parameter(torch.empty(num_experts, 4 * dim, dim).normal_(0, 0.02))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        q, k, v = self.query(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        weights = self.router(x).softmax(-1)
        inner = torch.einsum("bsd,edf->bsef", x, self.up).relu()
        return x + torch.einsum("bsef,efd,bse->bsd", inner, self.down, weights)


class Mixture(nn.Module):
    def __init__(self, vocab_size, dim=128, num_layers=6):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Experts(dim, 4, index) for index in range(num_layers))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Translator(nn.Module):
    def __init__(self, vocab_size, dim=64):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size)
        self.transformer = nn.Transformer(dim, 4, 2, 2, 128, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.transformer(x, x))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, stride=4)
        self.layers = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(5))
        self.head = nn.Linear(64, 10)

    def forward(self, image):
        x = self.stem(image)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x.mean((2, 3)))


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.zeros(3, 32, 32), index % 10


def images():
    return Items()
"""
TOKENS = '[data]\nuse = "synthetic"\nseq_len = 128\nvocab_size = 1000\n'
IMAGES = '[data]\nuse = "ODD:images"\n'
LLAMA = 'use = "composer3d.models:llama"\nargs = { dim = 256, num_layers = 6, num_heads = 4, vocab_size = 1000 }\n'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return what writes a manifest and returns its path."""
    monkeypatch.chdir(tmp_path)

    def written(model, *, data=TOKENS, tables="[precision.mixed]\n"):
        # A module of a name is imported once in a process, so each has its own.
        module = tmp_path.name
        (tmp_path / f"{module}.py").write_text(MODELS)
        model, data = model.replace("ODD", module), data.replace("ODD", module)
        (tmp_path / "run.toml").write_text(
            f"composer3d = 1\n[mesh]\ndp_shard = 4\n[model]\n{model}{data}"
            f"[train]\nsteps = 1\nglobal_batch = 32\nmicrobatch = 2\n[sharding.fsdp2]\n{tables}"
        )
        return "run.toml"

    return written


@pytest.mark.parametrize(
    ("name", "data", "unit"),
    [
        ("Mixture", TOKENS, "tokens"),
        pytest.param("Translator", TOKENS, "tokens", marks=pytest.mark.slow),
        ("Pictures", IMAGES, "samples"),
    ],
)
def test_any_model_that_check_accepts_is_suggested_for(write, name, data, unit):
    path = write(f'use = "ODD:{name}"\n', data=data)
    # One layout: each that is proposed is planned, which takes a second.
    pins = ["tp=1", "pp=1", "zero=3", "microbatch=2", "recompute=none", "offload=false", "precision=bfloat16"]
    found = suggest(path, world_size=4, keep=[*pins, "dp_shard=4"])
    assert found.ok, found.refused
    report = found.to_json()
    assert report["parameters"] == found.num_parameters > 0
    assert report["suggestions"][0]["time"][f"{unit}_per_s_per_device"]["value"] > 0


def layouts(own):
    yield own
    yield replace(own, recompute="full")
    yield replace(own, microbatch=4)
    yield replace(own, tp=2, dp_shard=2, sequence_parallel=True)
    yield replace(own, pp=2, dp_shard=2, schedule="1F1B")


def test_costs_of_the_search_are_near_those_of_the_plan(write):
    given = GivenManifest.of(write(LLAMA), (), 4, load_hardware("h100"))
    for setup in layouts(given.own):
        planned = given.planned(setup)
        assert given.costs.can(setup)
        assert given.costs.peak_bytes(setup) == pytest.approx(planned.peak, rel=0.25), setup
        assert given.costs.step_s(setup) == pytest.approx(planned.time["step_s"]["value"], rel=0.35), setup


def test_a_degree_that_check_refuses_is_asked_once_and_its_multiples_not_at_all():
    asked = []

    def trace(setup):
        asked.append(setup.tp)
        raise ComposerError(f"no tp = {setup.tp}")

    run = Setup(seq_len=128, global_batch=32, microbatch=2)
    costs = LayoutCosts(trace=trace, hardware=load_hardware("h100"), own=run, num_blocks=6)
    assert not any(costs.can(replace(run, tp=tp, dp_shard=dp)) for tp in (2, 3, 4, 6, 8) for dp in (1, 2))
    assert asked == [2, 3]
    assert costs.refused == ["no tp = 2", "no tp = 3"]
