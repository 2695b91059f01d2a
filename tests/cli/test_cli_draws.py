"""Draws of a forward that depend on the layout, or come from generators that no run sets: `check` says them."""

from __future__ import annotations

import pytest

MODELS = """
import random, torch
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)


class Drop(Base):
    def forward(self, x):
        return self.a(x) * torch.rand(1)


class Common(Base):
    def forward(self, x):
        return self.a(x) * torch.rand(())


class Foreign(Base):
    def forward(self, x):
        return self.a(x) * random.random()


class Fine(Base):
    def forward(self, x):
        return self.a(x) * torch.rand(x.shape[0], 1)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(4), index % 3
"""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Drop", "draws random numbers at rand in the model, drawn.py:14, without samples"),
        ("Foreign", "its forward draws from Python's random, whose state"),
        ("Fine", ""),
        ("Common", ""),
    ],
)
def test_a_draw_that_depends_on_the_layout_is_said(model, said, tmp_path, command, monkeypatch):
    (tmp_path / "drawn.py").write_text(MODELS)
    text = f'composer3d = 1\n[model]\nuse = "drawn:{model}"\n[data]\nuse = "drawn:Data"\n'
    (tmp_path / "run.toml").write_text(text + "[train]\nsteps = 2\nmicrobatch = 2\n")
    monkeypatch.chdir(tmp_path)
    code, *told = command("check", "run.toml")
    assert code == 0 and said in "".join(told) and ("warning" in "".join(told)) == bool(said)
