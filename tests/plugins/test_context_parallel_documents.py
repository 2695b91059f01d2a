"""Batches of packed documents over cp: ranks have equal work inside of documents, and compute what one device does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.family_models import class_loss
from support.models import mine, write_manifest
from support.sequence_models import DIM, VOCAB, Language
from support.sequence_steps import context, seeded
from torch import nn

import composer3d
from composer3d.testing import full, run_ranks

FSDP = "[sharding.fsdp2]\n"
COMPILE = '[scheduling.compile]\nbackend = "aot_eager"\nunits = ["head"]\n'
LENGTH = 48
# Ends of the documents of two batches: of the first no zigzag is balanced, of the second it is.
ENDS = ((31, 33), (17, 45))


class Packed(Language):
    """Documents by number, causal inside of each, and a causal convolution over all of them."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(DIM, DIM, 3)

    def forward(self, tokens, document_ids):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = x + self.convolution(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        for block in self.layers:
            x = x + self.mixed(block, block["norm"](x), document_ids)
            x = x + F.silu(block["up"](x))
        return self.head(x)

    def attend(self, q, k, v, document_ids):
        at = torch.arange(q.shape[2], device=q.device)
        mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]) & (at[:, None] >= at)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def packed(step):
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(1, VOCAB, (2, 2, LENGTH), generator=generator)
    targets[:, torch.tensor(ENDS[step])] = -100
    numbers = torch.bucketize(torch.arange(LENGTH), torch.tensor(ENDS[step]), right=True).expand(2, -1).contiguous()
    return tokens, numbers, targets


def stepped(text):
    """Train two steps; return the largest error beside one device, and each step's positions of this rank."""
    torch.set_default_dtype(torch.float64)
    tokens, numbers, _ = packed(0)
    alone, errors, held = seeded(Packed), [], []
    run = composer3d.compose(
        seeded(Packed), write_manifest(text), loss_fn=class_loss, example=((tokens,), {"document_ids": numbers})
    )
    (found,) = (state for state in run.context.state.values() if hasattr(state, "sequences"))
    for step in range(len(ENDS)):
        tokens, numbers, targets = packed(step)
        total, count = class_loss(alone(tokens, numbers), targets)
        alone.zero_grad()
        (total / count).backward()
        with run.step(step):
            loss = run.forward_backward(mine(run, tokens), document_ids=mine(run, numbers), target=mine(run, targets))
            own = {name: full(p.grad) for name, p in run.named_parameters() if p.grad is not None}
            for _, parameter in run.named_parameters():
                parameter.grad = None
        errors.append(float((loss - total.detach() / count).abs()))
        scale = max(float(p.grad.abs().max()) for p in alone.parameters())
        errors += [float((own[n] - p.grad).abs().max()) / scale for n, p in alone.named_parameters() if n in own]
        positions = found.sequences.positions.get(LENGTH)
        held.append(None if positions is None else positions.runs)
    run.close()
    return max(errors), held


def work(runs, ends):
    """Return by rank the visible pairs of query and key."""
    starts = [max([0, *(end for end in ends if end <= at)]) for at in range(LENGTH)]
    return [sum(at - starts[at] + 1 for run in rank for at in range(*run)) for rank in runs]


@pytest.mark.parametrize(
    ("world_size", "text"),
    [
        (2, context("ring", more=FSDP)),
        pytest.param(4, context("gather", degree=4), marks=pytest.mark.slow),
        pytest.param(
            4,
            context("ulysses", mesh="dp_shard = 2", more=FSDP + "[scheduling.activation_checkpoint]\n"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_documents_balance_ranks_and_change_no_number(world_size, text):
    ranks = run_ranks(stepped, world_size, text)
    assert max(apart for apart, _ in ranks) <= 1e-12
    _, held = ranks[0]
    assert all(found == held for _, found in ranks)
    assert held[0] is not None
    for runs, ends in zip(held, ENDS, strict=True):
        if runs is not None:
            loads = work(runs, ends)
            assert max(loads) / (sum(loads) / len(loads)) < 1.15


@pytest.mark.slow
@pytest.mark.parametrize("more", ["balanced = false\n", COMPILE], ids=["contiguous", "compiled"])
def test_positions_that_are_fixed_know_no_documents(more):
    ((apart, held), *_) = run_ranks(stepped, 2, context("gather", more=more))
    assert apart <= 1e-12 and held == [None, None]
