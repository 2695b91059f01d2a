"""Rows of tokens, and global batches concatenated over ranks, for the tests of the loader."""

from __future__ import annotations

import torch

from composer3d.runner.data import Loader
from composer3d.runner.data.user_data import UserSource

RAMP = [4, 4, 8, 8, 8, 12]


def ramp(step):
    return RAMP[min(step, len(RAMP) - 1)]


def ramp_position(step):
    return sum(ramp(earlier) for earlier in range(step))


class Rows:
    """Rows of tokens: row i holds i + 1 and more, length by length."""

    def __init__(self, lengths, with_lengths=True):
        self.rows = [list(range(start, start + length + 1)) for start, length in enumerate(lengths)]
        self.num_read = 0
        if with_lengths:
            self.lengths = [len(row) for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        self.num_read += 1
        return self.rows[number]


def loader_of(source, table, *, rank=0, degree=1, seed=3, batch=8, **options):
    options = {"batch_size_of": lambda step: batch, "position_of": lambda step: step * batch, **options}
    return Loader(source, table, seed=seed, rank=rank, degree=degree, **options)


def user_source(dataset, table):
    return UserSource(dataset, table, first=0, num_samples=len(dataset))


def global_batches(make, degree, steps):
    """Return the global batches, concatenated over ranks, step by step."""
    loaders = [make(rank, degree) for rank in range(degree)]
    batches = [[loader.batch(step) for loader in loaders] for step in steps]
    return [
        (
            torch.cat([b.tokens for b in parts]),
            torch.cat([b.targets for b in parts]),
            sum((b.indices for b in parts), ()),
        )
        for parts in batches
    ]


def assert_same(left, right):
    assert len(left) == len(right) > 0
    for (tokens, targets, numbers), (other_tokens, other_targets, other_numbers) in zip(left, right, strict=True):
        assert torch.equal(tokens, other_tokens) and torch.equal(targets, other_targets) and numbers == other_numbers
