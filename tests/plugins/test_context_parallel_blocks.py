"""Blocks of attention of a sharded sequence: what each computes, and that they are one device's attention together."""

from __future__ import annotations

import pytest
import torch
from composer3d_plugins.sharding.context_parallel.attention_blocks import blocks_between
from composer3d_plugins.sharding.context_parallel.attention_pattern import Kind, Pattern
from composer3d_plugins.sharding.context_parallel.sequence_operators import block_attention
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions, contiguous, zigzag
from torch.nn.functional import scaled_dot_product_attention


@pytest.mark.parametrize(
    ("length", "assign", "softcap"),
    [(300, zigzag, 0.0), (520, zigzag, 0.0), (300, contiguous, 0.0), (300, zigzag, 5.0)],
)
def test_causal_rows_of_any_length_are_those_of_one_device(length, assign, softcap):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    grad = torch.randn(2, 4, length, 8, dtype=torch.float64)
    if softcap:
        scores = softcap * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 8**-0.5 / softcap)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        expected = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    else:
        expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    rows, whole = assign(length, 2), Positions.whole(length)
    found = torch.empty_like(expected)
    for rank in range(2):
        index = rows.index(rank)
        call = {"rows": rows, "columns": whole, "rank": rank, "pattern": Pattern.causal(), "scale": 8**-0.5}
        out = block_attention(q[:, :, index], k, v, None, softcap=softcap, **call)
        found = found.index_copy(2, index, out)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    for one, other in zip(torch.autograd.grad(found, (q, k, v), grad), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def visible(blocks):
    """Return how often blocks count each score, [rows, columns]."""
    seen = torch.zeros(max(block.rows[1] for block in blocks), max(block.columns[1] for block in blocks))
    for block in blocks:
        shape = block.rows[1] - block.rows[0], block.columns[1] - block.columns[0]
        ones = torch.ones(shape)
        if block.kind is not Kind.ALL:
            ones = ones.tril(shape[1] - shape[0])
        seen[slice(*block.rows), slice(*block.columns)] += ones
    return seen


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("keys", ["gathered", "of this rank"])
@pytest.mark.parametrize("length", [96, 256, 1100, 2200])
def test_blocks_count_each_visible_score_once(length, keys, device):
    for rank in range(2):
        queries = zigzag(length, 2).runs[rank]
        held = ((0, length),) if keys == "gathered" else queries
        blocks = blocks_between(queries, held, Pattern.causal(), False, device)
        rows, columns = (torch.cat([torch.arange(*run) for run in runs]) for runs in (queries, held))
        expected = (columns <= rows.unsqueeze(1)).float()
        found = visible(blocks)
        assert torch.equal(found, expected[: found.shape[0], : found.shape[1]])
        assert found.sum() == expected.sum()


def test_rows_of_a_short_causal_run_are_one_block_each_on_cpu_alone():
    queries, keys = ((64, 192),), ((0, 256),)
    on_cpu = blocks_between(queries, keys, Pattern.causal(), False, "cpu")
    assert [(block.rows, block.columns, block.kind) for block in on_cpu] == [
        ((0, 64), (0, 128), Kind.ENDING),
        ((64, 128), (0, 192), Kind.ENDING),
    ]
    kinds = [block.kind for block in blocks_between(queries, keys, Pattern.causal(), False, "cuda")]
    assert kinds == [Kind.ALL, Kind.CAUSAL]
    # Windows, and masks with values, have blocks of their own.
    assert Kind.ENDING not in {b.kind for b in blocks_between(queries, keys, Pattern.causal(100), False, "cpu")}
    assert Kind.ENDING not in {b.kind for b in blocks_between(queries, keys, Pattern.causal(), True, "cpu")}
    # Nor are the scores of one block many.
    for length in (2048, 40000):
        found = blocks_between(zigzag(length, 2).runs[0], ((0, length),), Pattern.causal(), False, "cpu")
        ending = [b for b in found if b.kind is Kind.ENDING]
        assert all((b.rows[1] - b.rows[0]) * (b.columns[1] - b.columns[0]) <= 1 << 18 for b in ending)
