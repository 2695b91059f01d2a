from __future__ import annotations

import itertools
import math
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer3d.composition.loop.sampling import Sampler, indices, local_slice
from composer3d.errors import BatchError, DataError

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 97, 100, 1009, 1023, 1024, 1025, 1089, 1090, 4096, 4099, 65536, 65537, 100_003]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1, -5, 2**70])
def test_every_epoch_is_a_permutation(size, seed):
    stream = indices(0, 3 * size, size=size, seed=seed).reshape(3, size)
    assert (np.sort(stream, axis=1) == np.arange(size)).all()


@pytest.mark.parametrize("size", [3, 1000, 1025, 100_003])
def test_the_stream_does_not_depend_on_how_it_is_cut(size):
    whole = indices(0, 500, size=size, seed=7)
    pieces = [indices(start, count, size=size, seed=7) for start, count in [(0, 1), (1, 99), (100, 0), (100, 400)]]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert [int(indices(place, 1, size=size, seed=7)[0]) for place in range(500)] == whole.tolist()


def test_the_order_is_the_same_on_every_machine():
    assert indices(0, 8, size=10, seed=0).tolist() == [0, 6, 9, 5, 1, 3, 8, 2]
    assert indices(5 * 10**9, 4, size=10**9, seed=3).tolist() == [198520191, 592274296, 109916821, 153259272]


def test_seeds_and_epochs_give_other_orders():
    streams = [indices(0, 4000, size=2000, seed=seed).reshape(2, 2000) for seed in range(3)]
    orders = {tuple(epoch.tolist()) for stream in streams for epoch in stream}
    assert len(orders) == 6


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_every_permutation_of_a_small_set_is_as_likely(size):
    num_epochs = 20_000
    seen = Counter(map(tuple, indices(0, num_epochs * size, size=size, seed=3).reshape(num_epochs, size).tolist()))
    expected = num_epochs / math.factorial(size)
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in itertools.permutations(range(size)))
    freedom = math.factorial(size) - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1000, 1025, 4099])
def test_large_orders_look_random(size):
    num_epochs = 1_000_000 // size
    epochs = indices(0, num_epochs * size, size=size, seed=11).reshape(num_epochs, size)
    # Of a random permutation: one fixed point on average (variance 1), half of the steps upward, neighbours unrelated.
    assert abs((epochs == np.arange(size)).sum(1).mean() - 1) < 5 / math.sqrt(num_epochs)
    assert abs((np.diff(epochs) > 0).mean() - 0.5) < 5 / math.sqrt(12 * num_epochs * size)
    pairs, *_ = np.histogram2d(epochs[:, :-1].ravel(), epochs[:, 1:].ravel(), bins=8)
    assert abs(pairs / pairs.mean() - 1).max() < 0.05


def test_a_billion_samples_cost_neither_memory_nor_time():
    tracemalloc.start()
    times_s = []
    for step in range(20):
        start_s = time.perf_counter()
        batch = indices(step * 1024, 1024, size=10**9, seed=0)
        times_s.append(time.perf_counter() - start_s)
        assert len(set(batch.tolist())) == 1024 and 0 <= batch.min() and batch.max() < 10**9
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A permutation of 1e9 would take 8e9 bytes and minutes.
    assert peak_bytes < 1e6 and min(times_s) < 10


def test_unshuffled_epochs_keep_the_order():
    assert indices(3, 5, size=5, seed=9, shuffle=False).tolist() == [3, 4, 0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 0), "a data set of 0 samples has no order; it needs at least 1 sample"),
        ((-1, 1, 5), "the stream of samples has no position -1 with 1 samples; both start at 0"),
    ],
)
def test_impossible_streams_are_refused(arguments, message):
    position, count, size = arguments
    with pytest.raises(DataError) as caught:
        indices(position, count, size=size, seed=0)
    assert str(caught.value) == message


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_cuts_of_all_ranks_are_the_batch(degree):
    batch = indices(0, 8, size=100, seed=0)
    cuts = [local_slice(batch, rank, degree) for rank in range(degree)]
    assert np.concatenate(cuts).tolist() == batch.tolist()
    assert {len(cut) for cut in cuts} == {8 // degree}


@pytest.mark.parametrize(
    ("num", "rank", "degree", "message"),
    [
        (10, 0, 4, "a global batch of 10 samples does not divide over 4 data-parallel ranks; use 8 or 12"),
        (3, 1, 4, "a global batch of 3 samples does not divide over 4 data-parallel ranks; use 4"),
        (8, 4, 4, "data-parallel rank 4 does not exist among 4; ranks are 0 to degree - 1"),
    ],
)
def test_cuts_that_do_not_exist_are_refused(num, rank, degree, message):
    with pytest.raises(BatchError) as caught:
        local_slice(range(num), rank, degree)
    assert str(caught.value) == message


def sampler(rank=0, degree=1, size=21, global_batch=4, seed=5, **options):
    return Sampler(size, seed=seed, global_batch=global_batch, rank=rank, degree=degree, **options)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_sampler_gives_every_layout_the_same_steps(degree):
    ranks = [list(sampler(rank, degree)) for rank in range(degree)]
    steps = [list(itertools.chain(*locals_)) for locals_ in zip(*ranks, strict=True)]
    stream = indices(0, 20, size=21, seed=5).reshape(5, 4).tolist()
    assert len(sampler()) == 5 and steps == stream


def test_the_passes_of_a_sampler_follow_each_other():
    mine = sampler()
    assert [*mine, *mine] == indices(0, 40, size=21, seed=5).reshape(10, 4).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_with_workers_resumes_at_the_step_that_the_loop_reached(num_workers):
    dataset = TensorDataset(torch.arange(21))

    def loader(mine):
        return DataLoader(dataset, batch_sampler=mine, num_workers=num_workers)

    whole = [batch.tolist() for (batch,) in loader(sampler())]
    first = sampler()
    seen = []
    for step, (batch,) in enumerate(loader(first)):
        seen.append(batch.tolist())
        first.set_step(step + 1)
        if step == 1:
            break
    second = sampler()
    second.load_state_dict(first.state_dict())
    seen += [batch.tolist() for (batch,) in loader(second)]
    assert first.state_dict()["step"] == 2 and seen == whole


def test_a_sampler_without_set_step_counts_what_it_handed_out():
    mine = sampler()
    steps = iter(mine)
    next(steps), next(steps)
    assert mine.state_dict() == {"step": 2, "seed": 5, "size": 21, "shuffle": True}


def test_a_sampler_takes_a_data_set_and_may_keep_its_order():
    mine = Sampler(TensorDataset(torch.arange(4)), seed=0, global_batch=2, rank=1, degree=2, shuffle=False)
    assert list(mine) == [[1], [3]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: sampler(degree=3),
            BatchError,
            "a global batch of 4 samples does not divide over 3 data-parallel ranks; use 3 or 6",
        ),
        (
            lambda: sampler(global_batch=22),
            BatchError,
            "a global batch of 22 samples is larger than the data set of 21",
        ),
        (lambda: sampler(global_batch=0), BatchError, "a global batch of 0 samples is empty; use at least 1"),
        (lambda: sampler(size=0), DataError, "a data set of 0 samples has no order; it needs at least 1 sample"),
        (
            lambda: sampler(size=iter([])),
            DataError,
            "a list_iterator has no length, so its samples have no order; give a map-style data set with __len__ and "
            "__getitem__, or the number of samples",
        ),
        (lambda: sampler().set_step(-1), DataError, "there is no step -1; steps start at 0"),
        (
            lambda: sampler().load_state_dict({"step": 1, "seed": 6, "size": 21, "shuffle": True}),
            DataError,
            "the saved data order has seed = 6 and this one 5; going on would repeat some samples and leave out others",
        ),
    ],
)
def test_samplers_that_cannot_be_are_refused(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message
