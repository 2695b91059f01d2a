"""Blocks that are given rows which values choose, where the dry run found shards: one device's loss and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.family_models import class_loss
from support.models import write_manifest
from support.sequence_models import DIM, HEADS, VOCAB
from support.sequence_steps import context, padded_batch, seeded, sequence_steps
from torch import nn
from torch.utils.checkpoint import checkpoint

import composer3d
from composer3d.testing import full, run_ranks

RECOMPUTED = '[scheduling.activation_checkpoint]\nmode = "full"\n'


class Rows(nn.Module):
    """Attention among the rows of a document, as code for packed sequences has it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, rows, ends):
        document = torch.bucketize(torch.arange(len(rows)), ends, right=True)
        mask = (document[:, None] == document) & torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
        q, k, v = (each.view(len(rows), HEADS, -1).transpose(0, 1) for each in self.qkv(rows).chunk(3, -1))
        return rows + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1))


class Unpadded(nn.Module):
    """Takes padding out before its blocks, and puts it back after them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.position = nn.Embedding(64, DIM)
        self.layers = nn.ModuleList(Rows() for _ in range(2))

    def through(self, layer, *given):
        return layer(*given)

    def forward(self, tokens):
        x, kept = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1])), tokens != 0
        at, ends = torch.nonzero(kept.flatten()).flatten(), kept.sum(1).cumsum(0)
        rows = x.flatten(0, 1)[at]
        for layer in self.layers:
            rows = self.through(layer, rows, ends)
        return self.returned(rows, at, tokens)

    def returned(self, rows, at, tokens):
        padded = rows.new_zeros(tokens.numel(), DIM).index_put((at,), rows)
        return self.head(padded.view(*tokens.shape, DIM))


class Recomputed(Unpadded):
    def through(self, layer, *given):
        return checkpoint(layer, *given, use_reentrant=False)


class Pooled(Unpadded):
    """No size tells that rows are no shards: attention among some of them was another model's, without an error."""

    def returned(self, rows, at, tokens):
        sample = at // tokens.shape[1]
        return self.head(rows.new_zeros(len(tokens), DIM).index_add(0, sample, rows))


class Chunked(Unpadded):
    """A router chooses positions; blocks relate all that it has chosen."""

    def __init__(self):
        super().__init__()
        del self.layers
        self.before, self.chunks = Chunks(), nn.ModuleList(Chunks() for _ in range(2))

    def forward(self, tokens):
        x = self.before(self.embedding(tokens) + self.position(torch.arange(tokens.shape[1])))
        chosen = F.pad((x[:, 1:] * x[:, :-1]).sum(-1) > 0, (1, 0), value=True)
        most, at = int(chosen.sum(1).max()), torch.arange(tokens.shape[1])
        first = (at + ~chosen * tokens.shape[1]).argsort(1)[:, :most]
        chunks = x.gather(1, first[..., None].expand(-1, -1, DIM))
        for layer in self.chunks:
            chunks = layer(chunks)
        return self.head(x + chunks.gather(1, (chosen.cumsum(1) - 1)[..., None].expand(-1, -1, DIM)))


class Chunks(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x):
        return x + F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


def tail():
    """Padding at the tail of the second sample alone."""
    (tokens,), kwargs, targets = padded_batch()
    return (torch.where(torch.arange(tokens.shape[1]) < 3, 1, tokens),), kwargs, targets


def of_samples():
    (tokens,), kwargs, targets = tail()
    return (tokens,), kwargs, targets[:, 5]


def test_rows_without_padding_and_chunks_are_related_as_on_one_device():
    cases = [
        *((model, context(), tail) for model in (Unpadded, Recomputed, Chunked)),
        (Unpadded, context(more=RECOMPUTED), tail),
        (Unpadded, context("ring"), tail),
        (Pooled, context(), of_samples),
    ]
    for found in run_ranks(sequence_steps, 2, cases):
        for (model, *_), (loss, error, name, _) in zip(cases, found, strict=True):
            assert max(loss, error) <= 1e-12, (model, name)


class Masked(Unpadded):
    """Padding is known by a mask that the model is given, and that every rank has whole."""

    def forward(self, tokens, attention_mask):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        at, ends = torch.nonzero(attention_mask.flatten()).flatten(), attention_mask.sum(1).cumsum(0)
        rows = x.flatten(0, 1)[at]
        for layer in self.layers:
            rows = self.through(layer, rows, ends)
        return self.returned(rows, at, tokens)


def masked():
    (tokens,), _, targets = padded_batch()
    return (tokens,), {"attention_mask": (tokens != 0).long()}, targets


def masked_tail():
    (tokens,), _, targets = tail()
    return (tokens,), {"attention_mask": (tokens != 0).long()}, targets


def test_values_of_an_example_decide_nothing():
    cases = [
        *((model, context(), padded_batch) for model in (Unpadded, Recomputed, Chunked)),
        (Unpadded, context(more=RECOMPUTED), padded_batch),
        *((Masked, context(more=RECOMPUTED), batch) for batch in (masked, masked_tail)),
    ]
    for found in run_ranks(sequence_steps, 2, cases):
        for (model, *_), (loss, error, name, _) in zip(cases, found, strict=True):
            assert max(loss, error) <= 1e-12, (model, name)


def steps_after(example, recomputed):
    """Return how far gradients are from one device's of batches with other padding than the example's."""
    torch.set_default_dtype(torch.float64)
    (tokens,), _, targets = padded_batch()
    batches = [torch.where(tokens == 0, 1, tokens), tail()[0][0], tokens]
    text, found = write_manifest(context(more=RECOMPUTED * recomputed)), []
    run = composer3d.compose(seeded(Unpadded), text, loss_fn=class_loss, example=((batches[example],), {}))
    for step, batch in enumerate(batches):
        reference = seeded(Unpadded)
        loss, count = class_loss(reference(batch), targets)
        (loss / count).backward()
        with run.step(step):
            run.model.zero_grad()
            run.forward_backward(batch, target=targets)
            run.clip_grad_norm_(float("inf"))
        pairs = zip(run.named_parameters(), reference.named_parameters(), strict=True)
        found.append(max(float((full(p.grad) - q.grad).abs().max()) for (_, p), (_, q) in pairs))
    run.close()
    return found


@pytest.mark.parametrize("recomputed", [False, True])
def test_batches_with_other_padding_than_the_examples_are_one_devices(recomputed):
    for example in (0, 2):
        for found in run_ranks(steps_after, 2, example, recomputed):
            assert max(found) <= 1e-12


class Few(Unpadded):
    """As many rows as a number says, whatever the values."""

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        at = torch.nonzero((tokens != 0).flatten()).flatten()[:7]
        rows = x.flatten(0, 1)[at]
        for layer in self.layers:
            rows = self.through(layer, rows, torch.tensor([7]))
        return self.returned(rows, at, tokens)


def test_rows_of_which_nothing_stays_sharded_are_refused_with_what_to_write():
    with pytest.raises(composer3d.ComposerError) as caught:
        run_ranks(sequence_steps, 2, [(Few, context(), padded_batch)])
    message = str(caught.value)
    assert "context_parallel has no effect: the model's own code gathers the sequence (" in message
    assert (
        "and no attention, convolution or scan works on shards of it after that; let attention take samples, masked in "
        "place of rows that values choose; or leave out [sharding.context_parallel]"
    ) in message
