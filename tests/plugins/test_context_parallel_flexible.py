"""FlexAttention over a sharded sequence against its functions evaluated on one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from composer3d_plugins.sharding.context_parallel.attention_methods import Method
from composer3d_plugins.sharding.context_parallel.flexible_attention import attend_flexibly
from composer3d_plugins.sharding.context_parallel.sequence_attention import SequencePlan
from support.sequence_cases import HEADS, Case, inputs, sequence_group
from torch.nn.attention.flex_attention import create_block_mask

from composer3d.testing import run_ranks

ENDS = torch.tensor([13, 41])
LENGTH = 48


def visible(b, h, row, column):
    """Causal inside of packed documents; sample 1 has a window besides."""
    document = torch.bucketize(row, ENDS, right=True) == torch.bucketize(column, ENDS, right=True)
    return (column <= row) & document & ((b == 0) | (row - column < 7))


def reference(case, slopes, has_scores):
    q, k, v, grad = inputs(case, 1)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(HEADS // case.kv_heads, 1) for x in (k, v))
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    scores = q @ keys.transpose(-1, -2) * 0.3
    if has_scores:
        scores = 5 * torch.tanh((scores + slopes[:, None, None] * (columns - rows)) / 5)
    mask = torch.stack([visible(torch.tensor(b), None, rows, columns) for b in (0, 1)])[:, None]
    output = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values
    output.backward(grad)
    return [output.detach(), q.grad, k.grad, v.grad, slopes.grad]


def flexible(method, has_scores):
    group, case = sequence_group(), Case(length=LENGTH)
    positions, _ = case.positions(group.degree)
    slopes = torch.linspace(0.1, 0.8, HEADS, dtype=torch.float64).requires_grad_()

    def score_mod(score, b, h, row, column):
        return 5 * torch.tanh((score + slopes[h] * (column - row)) / 5)

    index = positions.index(group.rank)
    q, k, v, grad = (x[:, :, index].clone() for x in inputs(case, group.degree))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    block_mask = create_block_mask(visible, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    output = attend_flexibly(
        q, k, v, SequencePlan.of(Method(method), group, positions),
        score_mod=score_mod if has_scores else None, block_mask=block_mask, scale=0.3,
    )  # fmt: skip
    output.backward(grad)
    found = [output.detach(), q.grad, k.grad, v.grad]
    *expected, of_slopes = reference(case, slopes.detach().clone().requires_grad_(), has_scores)
    apart = [float((x - y[:, :, index]).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True)]
    if has_scores:
        dist.all_reduce(slopes.grad)
        apart.append(float((slopes.grad - of_slopes).abs().max() / of_slopes.abs().max()))
    return max(apart)


def flexible_cases():
    return {(method, scores): flexible(method, scores) for method, scores in CASES}


CASES = [("gather", False), ("ring", False), ("ulysses", False), ("gather", True), ("ulysses", True)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_flex_attention_is_that_of_one_device(world_size):
    for found in run_ranks(flexible_cases, world_size):
        assert {case: error for case, error in found.items() if not error <= 2e-14} == {}
