from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from composer3d.verification.arithmetic import in_double_precision, without_random_numbers


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.half(),
        lambda x: F.softmax(x, dim=0, dtype=torch.float32),
        lambda x: x + torch.ones(3, dtype=torch.float32),
        lambda x: nn.Linear(3, 3, dtype=torch.float32)(x),
        lambda x: nn.Linear(3, 3).float()(x),
    ],
)
def test_narrow_dtypes_are_read_as_double(cast):
    x = torch.rand(3, dtype=torch.float64)
    with in_double_precision():
        assert cast(x).dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32


def test_integers_stay_what_they_are():
    with in_double_precision():
        assert torch.arange(3).dtype is torch.int64
        assert torch.ones(2, dtype=torch.int32).to(torch.int64).dtype is torch.int64


ONES = torch.ones(64)
HEADS = torch.rand(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: nn.Dropout(0.5)(ONES), ONES),
        (lambda: F.dropout(ONES, 0.5), ONES),
        (lambda: F.dropout(ONES.clone(), 0.5, inplace=True), ONES),
        (lambda: F.alpha_dropout(ONES, 0.5, training=True), ONES),
        (lambda: F.dropout1d(ONES.view(1, 64, 1), 0.5), ONES.view(1, 64, 1)),
        (lambda: torch.rand_like(ONES), ONES / 2),
        (lambda: torch.rand(64), ONES / 2),
        (lambda: torch.randn(64), ONES * 0),
        (lambda: torch.bernoulli(ONES * 0.7), ONES),
        (lambda: torch.empty(64).bernoulli_(0.3), ONES * 0),
        (
            lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, dropout_p=0.5),
            F.scaled_dot_product_attention(HEADS, HEADS, HEADS),
        ),
    ],
)
def test_what_draws_gives_the_same_always(draw, expected):
    with without_random_numbers():
        assert torch.equal(draw(), expected)


def test_recurrent_and_attention_modules_drop_nothing():
    x = torch.rand(5, 2, 4, generator=torch.Generator().manual_seed(0))
    for make in (lambda p: nn.LSTM(4, 4, num_layers=2, dropout=p), lambda p: nn.MultiheadAttention(4, 2, dropout=p)):
        results = []
        for p in (0.0, 0.6):
            torch.manual_seed(1)
            module = make(p)
            with without_random_numbers():
                results.append(module(x)[0] if isinstance(module, nn.LSTM) else module(x, x, x)[0])
        assert torch.equal(*results)


def test_backwards_compute_again_in_the_same_arithmetic():
    x = torch.ones(64, requires_grad=True)
    with in_double_precision(), without_random_numbers():
        y = torch.utils.checkpoint.checkpoint(
            lambda x: F.dropout(x, 0.5).float() ** 2, x, use_reentrant=False, preserve_rng_state=False
        )
        y.sum().backward()
    assert torch.equal(x.grad, 2 * ONES)


WEIGHTS = torch.tensor([0.1, 0.7, 0.2])


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: torch.empty(64).exponential_(0.5), ONES * 2),
        (lambda: torch.empty(64).normal_(3.0, 2.0), ONES * 3),
        (lambda: torch.empty(64).normal_(mean=3.0), ONES * 3),
        (lambda: torch.empty(64).uniform_(1.0, 2.0), ONES * 1.5),
        (lambda: torch.empty(64).log_normal_(0.0), ONES),
        (lambda: torch.empty(64).cauchy_(1.0), ONES),
        (lambda: torch.empty(64).geometric_(0.4), ONES * 3),
        (lambda: torch.normal(ONES * 2, 1.0), ONES * 2),
        (lambda: torch.normal(2.0, 1.0, (64,)), ONES * 2),
        (lambda: torch.randint(3, 9, (64,)), ONES.long() * 3),
        (lambda: torch.randint(9, (64,)), ONES.long() * 0),
        (lambda: torch.randperm(64), torch.arange(64)),
        (lambda: torch.poisson(ONES * 2.2), ONES * 2),
        (lambda: torch.multinomial(WEIGHTS, 2), torch.tensor([1, 2])),
        (lambda: torch.multinomial(WEIGHTS, 3, replacement=True), torch.tensor([1, 1, 1])),
        (lambda: F.rrelu(-ONES, 0.1, 0.3, training=True), -ONES * 0.2),
        (lambda: F.gumbel_softmax(WEIGHTS, hard=True), torch.tensor([0.0, 1.0, 0.0])),
        (lambda: F.gumbel_softmax(WEIGHTS, tau=0.5), (WEIGHTS * 2).softmax(-1)),
    ],
)
def test_every_distribution_gives_its_likely_value(draw, expected):
    with without_random_numbers():
        assert torch.allclose(draw(), expected, rtol=1e-6, atol=0.0)
