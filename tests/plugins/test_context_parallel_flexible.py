"""FlexAttention over a sharded sequence against its functions evaluated on one device."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from composer3d_plugins.sharding.context_parallel.attention_methods import Method
from composer3d_plugins.sharding.context_parallel.flexible_attention import attend_flexibly
from composer3d_plugins.sharding.context_parallel.sequence_attention import SequencePlan
from support.sequence_cases import HEADS, Case, inputs, sequence_group
from support.sequence_models import Language
from support.sequence_steps import context, padded_batch, sequence_steps
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from composer3d import ComposerError
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


# ---- as models call it -----------------------------------------------------------------------------------------------


def causal_window(b, h, row, column):
    return (row >= column) & (row - column < 7)


class Flex(Language):
    """A block mask that is made in every forward; on one device written out, which has a backward on CPU."""

    is_reference = False

    def attend(self, q, k, v, tokens):
        places = [torch.arange(size) for size in (*q.shape[:3], k.shape[2])]
        if not self.is_reference:
            mask = create_block_mask(self.mask(tokens), *q.shape[:2], *places_of(q, k), device=q.device, BLOCK_SIZE=8)
            return self.kernel(q, k, v, block_mask=mask, **self.options())
        b, h, row, column = torch.meshgrid(*places, indexing="ij")
        scores = q @ k.repeat_interleave(q.shape[1] // self.kv_heads, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = self.options().get("score_mod", lambda score, *_: score)(scores, b, h, row, column)
        scores = scores.masked_fill(~self.mask(tokens)(b, h, row, column), -torch.inf)
        return scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // self.kv_heads, 1)

    def mask(self, tokens):
        return causal_window

    def kernel(self, q, k, v, **options):
        return flex_attention(q, k, v, **options)

    def options(self):
        return {}


def places_of(q, k):
    return q.shape[2], k.shape[2]


class FlexDocuments(Flex):
    """Documents that separators in the tokens end; two heads of keys."""

    def __init__(self):
        super().__init__(2)

    def mask(self, tokens):
        document_BS = (tokens == 1).cumsum(1)
        return lambda b, h, row, column: (document_BS[b, row] == document_BS[b, column]) & (row >= column)

    def options(self):
        return {"enable_gqa": True} if not self.is_reference else {}


class FlexScores(Flex):
    """Trained slopes and soft-capping, by a kernel that code has compiled, with the log-sum-exp carried along."""

    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor([2.0 ** -(h + 1) for h in range(4)]))

    def kernel(self, q, k, v, **options):
        output, statistics = COMPILED(q, k, v, return_aux=AuxRequest(lse=True), **options)
        return (output, statistics.lse.to(q.dtype))[0]

    def options(self):
        return {
            "score_mod": lambda score, b, h, row, column: 3 * ((score + self.slopes[h] * (column - row)) / 3).tanh()
        }


class FlexStatistics(FlexScores):
    """The log-sum-exp computed with, which sharded attention does not return."""

    def kernel(self, q, k, v, **options):
        output, statistics = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        return output * statistics.lse.exp().unsqueeze(-1)


COMPILED = torch.compile(flex_attention, backend="eager")


def reference_of(factory):
    def made():
        model = factory()
        model.is_reference = True
        return model

    return made


def test_models_that_call_flex_attention():
    kinds = [
        (Flex, "gather"),
        (Flex, "ring"),
        (FlexDocuments, "ulysses"),
        (FlexDocuments, "gather"),
        (FlexScores, "ring"),
    ]
    cases = [(kind, context(method), padded_batch, reference_of(kind)) for kind, method in kinds]
    found = run_ranks(sequence_steps, 2, cases, timeout_s=600)
    wrong = [
        (kind.__name__, method, each[:3])
        for result in found
        for (kind, method), each in zip(kinds, result, strict=True)
        if not max(each[:2]) <= 1e-12
    ]
    assert wrong == []
    assert found[0][1][3]["send"][0] == 8


def refusals():
    with pytest.raises(ComposerError) as caught:
        sequence_steps([(FlexStatistics, context(), padded_batch, reference_of(FlexStatistics))])
    return str(caught.value)


def test_statistics_that_are_computed_with_are_refused():
    for text in run_ranks(refusals, 2):
        assert "of the log-sum-exp of flex_attention, which sharded attention does not return" in text
