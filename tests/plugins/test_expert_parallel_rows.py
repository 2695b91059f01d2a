"""Rows of tokens in the order of their experts, and what comes back: values and gradients of plain indexing."""

from __future__ import annotations

import pytest
import torch
from composer3d_plugins.sharding.expert_parallel.routed_rows import combined, dispatched, places_of


def plain(hidden_TD, weights_TK, order_R, factor):
    """Return the same by indexing; gradients of rows are multiplied on the way, and not those of weights."""
    rows_RD = hidden_TD[order_R // weights_TK.shape[1]]
    rows_RD.register_hook(lambda grad: grad * factor)
    back_RD = rows_RD.tanh()
    back_RD.register_hook(lambda grad: grad / factor)
    out_RD = torch.empty_like(back_RD).index_copy(0, order_R, back_RD)
    return (out_RD.unflatten(0, tuple(weights_TK.shape)) * weights_TK.unsqueeze(-1)).sum(1)


def routed(hidden_TD, weights_TK, order_R, factor):
    places_R, top_k = places_of(order_R), weights_TK.shape[1]
    back_RD = dispatched(hidden_TD, order_R, places_R, top_k=top_k, factor=factor).tanh()
    return combined(back_RD, weights_TK, order_R, places_R, factor=1.0 / factor)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize(
    ("dtype", "of_weights", "tight"),
    [
        (torch.float64, torch.float64, 1e-14),
        (torch.float64, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 1e-2),
    ],
    ids=["double", "narrower weights", "wider weights"],
)
def test_values_and_gradients_are_those_of_indexing(num_tokens, dtype, of_weights, tight):
    generator = torch.Generator().manual_seed(0)
    hidden_TD, grad_TD = (torch.randn(num_tokens, 5, generator=generator) for _ in range(2))
    weights_TK = torch.rand(num_tokens, 3, generator=generator)
    order_R = torch.randint(0, 4, (3 * num_tokens,), generator=generator).argsort(stable=True)
    found = []
    for function in (plain, routed):
        hidden = hidden_TD.to(dtype).requires_grad_()
        weights = weights_TK.to(of_weights).requires_grad_()
        out_TD = function(hidden, weights, order_R, 2.0)
        out_TD.backward(grad_TD.to(out_TD.dtype))
        found.append((out_TD.detach(), hidden.grad, weights.grad))
    for expected, actual in zip(*found, strict=True):
        assert expected.dtype == actual.dtype and expected.shape == actual.shape
        scale = float(expected.double().abs().max()) if expected.numel() else 1.0
        assert torch.allclose(expected.double(), actual.double(), rtol=0, atol=tight * scale)
