from __future__ import annotations

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
