"""Selective checkpoints: ranges of the profiler are no operators, and results may be written in place."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from composer3d import torch_compat


def test_ranges_of_the_profiler_are_no_operators_of_a_selective_checkpoint():
    seen = []

    def block(x):
        seen.append(torch_compat.in_backward())
        for _ in seen:  # once more in the backward
            with torch.profiler.record_function("range"):
                pass
        return x.sin().cos()

    x = torch.full((3,), 0.5, requires_grad=True)
    contexts = functools.partial(torch_compat.selective_contexts, [torch.ops.aten.sin.default])
    checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert seen == [False, True]
    torch.testing.assert_close(x.grad, -x.detach().sin().sin() * x.detach().cos())


def _divided(x, weight):
    """Write into a choice, as routers do, into a view of a product, and into a product."""
    values, places = torch.topk((x @ weight).softmax(-1), 2)
    values /= values.sum(-1, keepdim=True)
    product = x @ weight
    product[:, 0] += 1
    product.relu_()
    return (values * product.gather(-1, places)).sum(-1, keepdim=True) @ weight[:1]


def _written_outside(x, weight):
    return x @ weight


@pytest.mark.parametrize("block", [_divided, _written_outside])
def test_results_that_are_written_in_place_are_kept_as_they_were(block):
    torch.manual_seed(0)
    kept = [torch.ops.aten.mm.default, torch.ops.aten.topk.default]
    contexts = functools.partial(torch_compat.selective_contexts, kept)
    inputs = [torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)]
    found = []
    for is_recomputed in (False, True):
        x, weight = (each.clone().requires_grad_() for each in inputs)
        if is_recomputed:
            out = checkpoint(block, x, weight, use_reentrant=False, context_fn=contexts)
        else:
            out = block(x, weight)
        out += x  # of a product that is kept, where nothing is written inside
        (out * out).sin().sum().backward()
        found.append((out.detach(), x.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_copy_is_kept_of_what_is_written_and_of_nothing_else():
    def block(x):
        x = x.sin()
        y = x.sin()
        y *= 2
        return x.cos() + y

    copies, x = [], torch.ones(3, requires_grad=True)
    contexts = functools.partial(torch_compat.selective_contexts, [torch.ops.aten.sin.default])

    def count(func, types, args, kwargs):
        copies.extend([func] if func is torch.ops.aten.clone.default else [])
        return func(*args, **kwargs)

    with torch_compat.dispatch_mode(count):
        checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(copies) == 1
