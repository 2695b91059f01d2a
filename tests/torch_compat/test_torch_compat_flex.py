from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from composer3d import torch_compat


def causal(b, h, row, column):
    return row >= column


def doubled(score, b, h, row, column):
    return score * 2


def test_calls_of_flex_attention_are_taken_over_with_their_functions():
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    mask = flex.create_block_mask(causal, None, None, 16, 16, device="cpu", BLOCK_SIZE=8)
    compiled, calls = torch.compile(flex.flex_attention, backend="eager"), []
    before = dict(vars(flex))

    def take(call):
        calls.append(call)
        return call.query, call.query[..., 0], call.query[..., 0]

    with torch_compat.taken_flex_calls(take):
        assert flex.flex_attention(q, k, v).shape == q.shape
        compiled(q, k, v, score_mod=doubled, block_mask=mask, scale=0.5)
        flex.flex_attention(q.to("meta"), k.to("meta"), v.to("meta"))
    assert [(call.score_mod, call.block_mask is None) for call in calls] == [
        (None, True),
        (doubled, False),
        (None, True),
    ]
    assert all(isinstance(call, torch_compat.FlexCall) for call in calls)
    taken = calls[1].block_mask
    assert torch.equal(taken.to_dense(), mask.to_dense()) and calls[1].scale == 0.5
    assert (taken.mask_mod, taken.BLOCK_SIZE, taken.shape) == (causal, (8, 8), mask.shape)
    assert {name: vars(flex)[name] for name in before} == before


def test_threads_take_over_their_own_calls_and_the_last_that_leaves_restores():
    q, barrier, before, compiled = torch.randn(2, 4, 16, 8), threading.Barrier(3, timeout=100), dict(vars(flex)), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    def run(number):
        def take(call):
            return torch.full_like(call.query, number), call.query[..., 0], call.query[..., 0]

        if number == 1:
            barrier.wait()  # the other has entered
        with torch_compat.taken_flex_calls(take):
            if number == 0:
                barrier.wait()
            barrier.wait()  # both have entered
            if number == 1:
                barrier.wait()  # the other has left
            output = flex.flex_attention(q, q, q)
        if number == 0:
            barrier.wait()
        return output

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(run, number) for number in (0, 1)]
        barrier.wait()
        barrier.wait()
        expected = flex.flex_attention(q, q, q)  # no take of this thread
        barrier.wait()
        assert [each.result().unique().tolist() for each in found] == [[0.0], [1.0]]
    torch.testing.assert_close(expected, torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert {name: vars(flex)[name] for name in before} == before
    torch.compile(torch.sin, backend=backend)(q)
    assert len(compiled) == 1


def test_takes_inside_of_takes_are_asked_first():
    q, before, asked = torch.randn(1, 1, 8, 8), dict(vars(flex)), []

    def outer(call):
        asked.append("outer")
        return call.whole()

    def inner(call):
        asked.append("inner")
        return call.whole()

    with pytest.raises(KeyError), torch_compat.taken_flex_calls(outer), torch_compat.taken_flex_calls(inner):
        output = flex.flex_attention(q, q, q)
        raise KeyError
    assert asked == ["inner", "outer"]
    torch.testing.assert_close(output, torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert {name: vars(flex)[name] for name in before} == before
