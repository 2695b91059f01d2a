"""Gradients that a narrower dtype represents: by chance, where they are sums of few narrow numbers, or by rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from composer3d.verification.evidence.known_changes import few_digits_say_little, narrow_dtype


def sums(*, num: int, size: int, seed: int, spread: int = 1) -> tuple[Tensor, Tensor]:
    """Return sums of one device and of ranks, of as many numbers of bf16, each added up in float32.

    Shapes: the two, summands, elements; summands of one element are up to `spread` binary orders apart.
    """
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-2
    weights = 2.0 ** (-spread * torch.rand(2, num, size, generator=torch.Generator().manual_seed(seed + 1)))
    one, other = ((weights / weights.sum(1, keepdim=True))[index] * values for index in range(2))
    return one.bfloat16().float().sum(0), other.bfloat16().float().sum(0)


def is_named(actual: Tensor, reference: Tensor) -> bool:
    narrow = narrow_dtype(actual)
    return bool(narrow) and not few_digits_say_little(actual, reference, narrow=narrow, largest=1e-2)


@pytest.mark.parametrize("size", [16, 32])
def test_sums_of_few_narrow_numbers_have_few_digits_by_chance(size: int):
    pairs = [sums(num=2, size=size, seed=seed) for seed in range(0, 4000, 2)]
    by_chance = [narrow_dtype(other) and not narrow_dtype(one) for one, other in pairs]
    assert sum(map(bool, by_chance)) > 5
    assert not any(is_named(other, one) for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num", [2, 4])
def test_sums_of_narrow_numbers_that_are_rounded_are_named(dtype: torch.dtype, num: int):
    for seed in range(0, 200, 2):
        one, other = sums(num=num, size=256, seed=seed, spread=6)
        assert is_named(other.to(dtype).float(), one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 16])
def test_wide_gradients_that_are_rounded_are_named_of_however_few_elements(dtype: torch.dtype, size: int):
    for seed in range(100):
        reference = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-2
        assert is_named(reference.to(dtype).float(), reference)
