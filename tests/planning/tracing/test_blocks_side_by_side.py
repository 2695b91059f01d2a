"""Equal modules that are called side by side, as tables and branches are: none of them can be left out of a trace."""

from __future__ import annotations

import pytest

from composer3d import plan

MODELS = """
import torch
from torch import nn


class Tables(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(vocab_size, 16) for _ in range(8))
        self.head = nn.Linear(16, vocab_size)

    def forward(self, tokens):
        return self.head(torch.stack([table(tokens) for table in self.tables]).sum(0))


class Wide(nn.Module):
    def __init__(self, vocab_size, width=48):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.branches = nn.ModuleList(nn.Linear(16, width) for _ in range(8))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(sum(branch(x).relu() for branch in self.branches))


class Alike(Wide):
    def __init__(self, vocab_size):
        super().__init__(vocab_size, width=16)


class Named(Alike):
    def forward(self, tokens):
        x = self.embed(tokens)
        for branch in self.branches:
            x = branch(input=x)
        return self.head(x)
"""


@pytest.mark.parametrize("name", ["Tables", "Wide", "Alike", "Named"])
def test_a_model_of_equal_modules_side_by_side_is_planned_as_with_all_of_them(name, tmp_path, monkeypatch):
    module = f"beside_{name.lower()}_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODELS)
    path = tmp_path / "run.toml"
    path.write_text(
        f'composer3d = 1\n[mesh]\ndp_shard = 2\n[model]\nuse = "{module}:{name}"\n[data]\nuse = "synthetic"\n'
        "vocab_size = 64\nseq_len = 8\n[train]\nsteps = 1\nglobal_batch = 4\n[sharding.fsdp2]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPOSER3D_TRACES", "off")
    found, whole = (plan(str(path), full=full).plan.ranks[0].trace for full in (False, True))
    assert found.memory == whole.memory
    assert found.segments == whole.segments
