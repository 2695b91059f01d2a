"""Sums of gradients by position are those of tensors that begin as zeros, whatever runs overlap."""

from __future__ import annotations

import pytest
import torch
from composer3d_plugins.sharding.context_parallel.summed_positions import SummedPositions, WrittenRuns

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
