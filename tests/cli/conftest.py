from __future__ import annotations

import sys

import pytest

from composer3d.cli import main

# What follows is one file: matrices of lines are easier to read than line numbers of a file elsewhere.
BASE = """\
composer3d = 1
[run]
device = "cpu"
[mesh]
dp_shard = 2
[model]
use = "cli_models:build"
blocks = "layers.*"
[data]
use = "text.txt"
seq_len = 16
[train]
steps = 2
global_batch = 4
[sharding.fsdp2]
"""

MODELS = """\
from torch import nn


class Layer(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).relu()


class Model(nn.Module):
    def __init__(self, dim, num_layers, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Layer(dim, dim) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).tanh()


def build(*, dim=8, num_layers=3, vocab_size):
    if dim % 2:
        raise ValueError(f"dim = {dim} is odd")
    return Model(dim, num_layers, vocab_size)


number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a manifest, a model and text; what is imported from it is forgotten afterwards."""
    (tmp_path / "cli_models.py").write_text(MODELS)
    (tmp_path / "text.txt").write_text("a text of some length, " * 40)
    (tmp_path / "run.toml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and sys.modules[name].__file__.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def edited(folder):
    """Write the manifest with a piece of it replaced, or with lines added at its end."""

    def write(old="", new=""):
        assert BASE.count(old) == 1 or not old
        (folder / "run.toml").write_text(BASE.replace(old, new) if old else BASE + new)

    return write


@pytest.fixture
def command(capsys):
    """Run one command in this process; return its exit code, standard output and standard error."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run
