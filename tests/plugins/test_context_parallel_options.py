"""Options of context_parallel: another dim that is the sequence, and modules that do the same with every token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.mixer_models import SelfAttending
from support.models import write_manifest
from support.sequence_models import DIM, VOCAB, Language
from support.sequence_steps import context, padded_batch, sequence_steps
from torch import nn

import composer3d
from composer3d import ComposerError
from composer3d.testing import run_ranks


class Codebooks(nn.Module):
    """Tokens of two codebooks a position, x_BKS, embedded, summed and predicted."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(VOCAB, DIM) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(DIM, VOCAB) for _ in range(2))
        self.layers = nn.ModuleList(SelfAttending() for _ in range(2))

    def forward(self, codes):
        x = sum(embedding(codes[:, k]) for k, embedding in enumerate(self.embeddings))
        for layer in self.layers:
            x = layer(x)
        return torch.stack([head(x) for head in self.heads], dim=1)


def two_codebooks():
    (tokens,), _, targets = padded_batch()
    return (torch.stack([tokens, tokens.flip(1)], 1),), {}, torch.stack([targets, targets.flip(1)], 1)


class Routed(nn.Module):
    """Two experts that tokens are sent to by their values, which no dry run on meta knows."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 2), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen, result = self.router(flat).argmax(-1), torch.zeros_like(flat)
        for at, expert in enumerate(self.experts):
            (where,) = (chosen == at).nonzero(as_tuple=True)
            result = result.index_add(0, where, expert(flat[where]) + flat[where] * self.router.weight[at])
        return result.view_as(x)


class Mixture(Language):
    """Experts beside attention."""

    def __init__(self):
        super().__init__()
        self.mixture = Routed()

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def mixed(self, block, x, tokens):
        return super().mixed(block, x, tokens) + self.mixture(x)


def test_other_dims_and_modules_that_do_the_same_with_every_token():
    cases = [
        (Codebooks, context("ring", more="sequence_dim = 2\n"), two_codebooks),
        (Mixture, context(more='rowwise = ["mixture"]\n'), padded_batch),
    ]
    for found in run_ranks(sequence_steps, 2, cases):
        assert [each[:3] for each in found if not max(each[:2]) <= 1e-12] == []
        assert [each[3]["all_gather"][0] for each in found if "all_gather" in each[3]] == [4]


def refused(text):
    path, example = write_manifest(text), padded_batch()[:2]
    with pytest.raises(ComposerError) as caught:
        composer3d.compose(Mixture, path, loss_fn=lambda out, target: out.sum(), example=example)
    return str(caught.value)


def test_refusals():
    for message in run_ranks(refused, 2, context(more='rowwise = ["mixtures"]\n')):
        assert 'the pattern "mixtures" matches nothing in the model; did you mean "mixture"?' in message
    for message in run_ranks(refused, 2, context(more="sequence_dim = 0\n")):
        assert "sequence_dim must be at least 1, not 0" in message
    for message in run_ranks(refused, 2, context(more="sequence_dim = 5\n")):
        said = "sequence_dim = 5 is no dim of the model's inputs, which have 2 at most, counted from 0; write a number"
        assert f":7:1: [sharding.context_parallel] {said} from 1 to 1" in message


class ByHand(nn.Module):
    """A softmax by hand."""

    def forward(self, x):
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class OfEveryKind(nn.Module):
    """What is sharded, exchanged, gathered and passed through."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers, self.mixture, self.product = nn.ModuleList(SelfAttending() for _ in range(2)), Routed(), ByHand()
        self.conv, self.recurrent = nn.Conv1d(DIM, DIM, 3, padding=1), nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, tokens):
        x = self.conv(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.recurrent(self.product(x))[0] + self.mixture(x))


def rows():
    text = context(more='rowwise = ["mixture"]\n')
    run = composer3d.compose(OfEveryKind, write_manifest(text), loss_fn=lambda out, target: out.sum())
    try:
        return {row.name: row.fqns for row in run.plan if row.name.startswith("context_parallel")}
    finally:
        run.close()


def test_rows_state_what_is_done_in_which_module():
    assert run_ranks(rows, 2)[0] == {
        "context_parallel.attention": ("layers.0.heads", "layers.1.heads"),
        "context_parallel.gathered": ("recurrent",),
        "context_parallel.neighbours": ("conv",),
        "context_parallel.products": ("product",),
        "context_parallel.rowwise": ("mixture",),
    }
