"""Padding stops where a model's tables of positions end: lengths beyond are refused before a forward, or explained."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from support.sequence_models import DIM, Language
from support.sequence_steps import context, padded_batch, sequence_steps
from torch import nn

from composer3d import BatchError
from composer3d.testing import run_ranks

ROWS = 14


class Tabled(Language):
    """A learned table of as many positions as the longest sequence has."""

    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(ROWS, DIM)

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Sliced(Tabled):
    """The table is a parameter, of which code takes the first rows."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, ROWS, DIM))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        for block in self.layers:
            x = x + self.mixed(block, block["norm"](x), tokens)
        return self.head(x)


class Bounded(Language):
    """No table, and an assertion."""

    def forward(self, tokens):
        assert tokens.shape[1] <= ROWS, f"at most {ROWS} tokens"
        return super().forward(tokens)

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def messages(models, length):
    found = []
    for model in models:
        with pytest.raises(BatchError) as caught:
            sequence_steps([(model, context(), functools.partial(padded_batch, length))])
        found.append(str(caught.value))
    return found


def test_lengths_whose_padding_a_model_has_no_positions_for_are_refused():
    (tabled, sliced, bounded), other = run_ranks(messages, 2, [Tabled, Sliced, Bounded], 14)
    assert [tabled, sliced, bounded] == other
    start = "a sequence of 14 tokens does not divide into 4 equal chunks, as context_parallel needs, and is not padded,"
    assert tabled == (f'{start} since "position" reads a table of 14 positions; use 12, or write balanced = false')
    assert sliced == (
        f"{start} since the model's own code reads a table of 14 positions; use 12, or write balanced = false"
    )
    assert bounded == (
        "a sequence of 14 tokens was padded to 16, since ranks of cp share it equally, and the model's code failed "
        "with that (AssertionError: at most 14 tokens); use 12 tokens, or write balanced = false"
    )


def test_lengths_that_the_table_has_are_padded():
    cases = [(Tabled, context(), functools.partial(padded_batch, 10))]
    for ((loss, error, *_),) in run_ranks(sequence_steps, 2, cases):
        assert max(loss, error) <= 1e-12
