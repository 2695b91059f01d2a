from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
from support.loader_batches import RAMP, Rows, assert_same, global_batches, loader_of, ramp, ramp_position, user_source

from composer3d.composition.loop.sampling import indices
from composer3d.runner.data import DataTable


@pytest.mark.parametrize("with_lengths", [True, False])
@pytest.mark.parametrize(
    ("keys", "widths"),
    [
        ({"padding": "seq_len"}, [10, 10]),
        ({"padding": "longest"}, [7, 9]),
        ({"padding": "multiple", "pad_multiple": 4}, [8, 10]),
    ],
)
def test_padding(keys, widths, with_lengths):
    table = DataTable(use="m:f", seq_len=10, order="sequential", pad_id=77, **keys)
    source = user_source(Rows([3, 7, 1, 5, 2, 2, 9, 4], with_lengths), table)
    whole = global_batches(lambda rank, degree: loader_of(source, table, rank=rank, degree=degree, batch=4), 1, [0, 1])
    cut = global_batches(lambda rank, degree: loader_of(source, table, rank=rank, degree=degree, batch=4), 4, [0, 1])
    assert_same(whole, cut)
    for (tokens, targets, numbers), width in zip(whole, widths, strict=True):
        for row, target, number in zip(tokens.tolist(), targets.tolist(), numbers, strict=True):
            true_tokens, true_targets = source[number]
            missing = width - len(true_tokens)
            assert row == true_tokens.tolist() + [77] * missing
            assert target == true_targets.tolist() + [-100] * missing


def test_stated_lengths_save_reading_the_samples_of_other_ranks():
    table = DataTable(use="m:f", seq_len=10, padding="longest")
    read = []
    for with_lengths in (True, False):
        rows = Rows([3, 7, 1, 5, 2, 2, 9, 4], with_lengths)
        loader = loader_of(user_source(rows, table), table, degree=4)
        before = rows.num_read
        loader.batch(0)
        read.append(rows.num_read - before)
    assert read == [2, 8]


LENGTHS = [(7 * number) % 31 + 1 for number in range(64)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_buckets_are_the_same_in_every_layout(degree, workers):
    table = DataTable(use="m:f", seq_len=40, padding="longest", bucket=4)
    source = user_source(Rows(LENGTHS), table)
    ahead = DataTable(use="m:f", seq_len=40, padding="longest", bucket=4, **({"workers": workers} if workers else {}))
    steps = [0, 1, 2, 5, 9]
    whole = global_batches(lambda rank, degree: loader_of(source, table, rank=rank, degree=degree), 1, steps)
    assert_same(
        whole, global_batches(lambda rank, degree: loader_of(source, ahead, rank=rank, degree=degree), degree, steps)
    )


@pytest.mark.parametrize("with_lengths", [True, False])
def test_buckets_hold_every_sample_once_an_epoch_and_save_padding(with_lengths):
    bucketed = DataTable(use="m:f", seq_len=40, padding="longest", bucket=4)
    plain = DataTable(use="m:f", seq_len=40, padding="longest")
    source = user_source(Rows(LENGTHS, with_lengths), bucketed)
    loader = loader_of(source, bucketed)
    epochs = [[loader.batch(step) for step in range(first, first + 8)] for first in (0, 8)]
    for epoch in epochs:
        assert sorted(sum((batch.indices for batch in epoch), ())) == list(range(64))
    window = [batch.indices for batch in epochs[0][:4]]
    assert sorted(sum(window, ())) == sorted(indices(0, 32, size=64, seed=3).tolist())
    # Within a window the batches are cut from one sorted row, and their order is shuffled.
    ranges = sorted((min(LENGTHS[i] for i in part), max(LENGTHS[i] for i in part)) for part in window)
    assert all(before[1] <= after[0] for before, after in zip(ranges, ranges[1:], strict=False))
    orders = [[batch.tokens.shape[1] for batch in epochs[place // 2][place % 2 * 4 :][:4]] for place in range(4)]
    assert any(order != sorted(order) for order in orders)
    padding = [
        sum(int((batch.targets == -100).sum()) for batch in batches)
        for batches in (epochs[0], [loader_of(source, plain).batch(step) for step in range(8)])
    ]
    assert padding[0] * 2 < padding[1]


def test_buckets_follow_a_ramp_of_the_batch():
    table = DataTable(use="m:f", seq_len=40, padding="longest", bucket=3)
    source = user_source(Rows(LENGTHS), table)
    loader = loader_of(source, table, batch_size_of=ramp, position_of=ramp_position)
    numbers = [loader.batch(step).indices for step in range(6)]
    assert [len(part) for part in numbers] == RAMP
    seen = list(accumulate(numbers, lambda left, right: left + right))
    stream = indices(0, sum(RAMP), size=64, seed=3).tolist()
    assert Counter(seen[2]) == Counter(stream[:16]) and Counter(seen[5]) == Counter(stream)
