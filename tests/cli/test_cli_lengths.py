"""Lengths that a plugin cannot place: `check` says so with the line that states them, before a run's first step."""

from __future__ import annotations

import pytest
from support.cli_reports import report

MODELS = '''
import torch
from torch import nn


class Model(nn.Module):
    """Adds the last token's features to those of every token, so that it would see padding."""

    def __init__(self, vocab_size):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)

    def forward(self, x):
        x = self.tokens(x)
        return self.head(x + x[:, -1:])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.arange(11), torch.arange(1, 12)
'''
MANIFEST = """\
composer3d = 1
mesh = {{ dp_shard = 1, cp = 2 }}
[run]
device = "cpu"
[model]
use = "lengths:Model"
[data]
{data}[train]
steps = 2
[sharding.fsdp2]
[sharding.context_parallel]
method = "gather"
"""
WHY = "is not padded, since the model's own code (__getitem__) sees padding as it sees tokens"


@pytest.fixture
def check(folder, command):
    (folder / "lengths.py").write_text(MODELS)

    def told(data):
        (folder / "run.toml").write_text(MANIFEST.format(data=data))
        return report(command, "run.toml")

    return told


@pytest.mark.parametrize(
    ("length", "told"),
    [
        (15, [("data", 9, "15 tokens", "use 12 or 16")]),
        (14, [("data", 9, "14 tokens", "use 12 or 16, or write balanced = false")]),
        (16, []),
    ],
)
def test_a_length_that_the_first_step_would_refuse_is_a_problem(check, length, told):
    code, found = check(f'use = "text.txt"\nseq_len = {length}\n')
    assert code == (2 if told else 0)
    problems = [(problem["table"], problem["line"], problem["message"]) for problem in found["problems"]]
    assert [problem[:2] for problem in problems] == [each[:2] for each in told]
    for (_, _, message), (_, _, tokens, remedy) in zip(problems, told, strict=True):
        assert message.startswith(f"a sequence of {tokens} does not divide into 4 equal chunks") and WHY in message
        assert message.endswith(remedy)


@pytest.mark.parametrize(("padding", "code"), [("", 2), ('padding = "longest"\n', 0)])
def test_the_length_of_a_users_samples_is_known_where_they_are_not_padded(check, padding, code):
    found_code, found = check(f'use = "lengths:Rows"\nvocab_size = 16\n{padding}')
    assert found_code == code
    assert [(problem["key"], problem["line"]) for problem in found["problems"]] == ([("use", 8)] if code else [])
