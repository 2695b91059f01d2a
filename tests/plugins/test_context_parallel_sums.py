"""Sums of gradients by position are those of tensors that begin as zeros, whatever runs overlap."""

from __future__ import annotations

import pytest
import torch
from composer3d_plugins.sharding.context_parallel.summed_positions import (
    SummedPositions,
    SummedTensor,
    WrittenRuns,
    is_side_by_side,
    side_by_side,
)

RUNS = ((0, 3), (5, 9), (2, 6), (2, 6), (0, 10), (9, 10), (12, 14))


@pytest.mark.parametrize("bounds", [(0, 16), (0, 4, 16), (0, 1, 5, 6, 13, 16)])
@pytest.mark.parametrize("number", range(len(RUNS) + 1))
def test_a_sum_of_runs_is_that_over_zeros(bounds, number):
    memory = torch.full((2, 1, 16, 3), float("nan"), dtype=torch.float64)
    wanted = torch.zeros_like(memory)
    pairs = list(zip(bounds, bounds[1:], strict=False))
    total = SummedPositions([(start, memory[:, :, start:end]) for start, end in pairs])
    for seed, (start, end) in enumerate(RUNS[:number]):
        values = torch.randn(2, 1, end - start, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        wanted[:, :, start:end] += values
        total.add((start, end), values)
    total.end()
    assert torch.equal(memory, wanted)


def test_written_runs_are_told_apart_and_joined():
    runs = WrittenRuns()
    assert runs.write((2, 4)) == [((2, 4), False)]
    assert runs.write((6, 8)) == [((6, 8), False)]
    assert runs.write((0, 9)) == [((0, 2), False), ((2, 4), True), ((4, 6), False), ((6, 8), True), ((8, 9), False)]
    assert runs.write((3, 7)) == [((3, 7), True)]
    assert runs.left((0, 12)) == [(9, 12)] and runs.left((0, 12)) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("runs", [(), ((0, 16),), ((0, 16), (2, 6), (0, 16)), ((2, 6), (0, 16), (0, 3)), RUNS])
def test_a_sum_that_begins_with_values_of_all_positions_is_in_their_memory(runs, is_apart, dtype):
    like = torch.empty(2, 4, 16, 3, dtype=torch.float64)
    wanted, total, given = torch.zeros(2, 4, 16, 3, dtype=torch.float64), SummedTensor(like, torch.float64), []
    for seed, (start, end) in enumerate(runs):
        values = torch.randn(2, 4, end - start, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        wanted[:, :, start:end] += values
        given.append(values if is_apart else side_by_side(values).copy_(values))
        total.add((start, end), given[-1])
    found = total.total()
    assert torch.equal(found, wanted) and is_side_by_side(found, dtype=torch.float64)
    takes = bool(runs) and runs[0] == (0, 16) and not is_apart and dtype is torch.float64
    assert (bool(given) and found.data_ptr() == given[0].data_ptr()) == takes
