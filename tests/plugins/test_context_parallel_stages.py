"""Stages of a pipeline whose code between blocks relates positions of what they received, equal to one device's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from composer3d_plugins.sharding.context_parallel.stage_values import StageValues
from support.sequence_models import DIM, HEADS, LENGTH, VOCAB
from support.sequence_steps import context, padded_batch, sequence_steps
from torch import nn

from composer3d.propagation import Placed, PropagationError, mark
from composer3d.testing import run_ranks


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.out(attend(*self.qkv(x).chunk(3, -1)))


class Reader(nn.Module):
    """Attends to keys and values that it is given."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, DIM)

    def forward(self, x, k, v):
        return x + attend(self.query(x), k, v)


def attend(q, k, v):
    B, S, D = q.shape
    q, k, v = (y.view(B, S, HEADS, -1).transpose(1, 2) for y in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D)


class Root(nn.Module):
    """Four blocks, of which two are on each stage; what the root does between them is stated by subclasses."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(self.layer(at) for at in range(4))
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def layer(self, at):
        return Layer()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for at, layer in enumerate(self.layers):
            x = layer(self.between(x) if at == 2 else x)
        return self.head(x)

    def between(self, x):
        return x + attend(*self.qkv(x).chunk(3, -1))


class Shifted(Root):
    def between(self, x):
        return x + self.qkv(F.pad(x, (0, 0, 1, 0))[:, :-1])[..., :DIM]


class Pooled(Root):
    def between(self, x):
        return x + x.shape[1] * self.qkv(x.mean(1, keepdim=True))[..., :DIM]


class Yoco(Root):
    """Global keys and values, computed once of what the first blocks return; the root reads them too."""

    def layer(self, at):
        return Layer() if at < 2 else Reader()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers[:2]:
            x = layer(x)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + attend(q, k, v)
        for layer in self.layers[2:]:
            x = layer(x, k, v)
        return self.head(x)


class Skipped(Root):
    """Values of several blocks travel, and the root relates positions of those of another stage."""

    def forward(self, tokens):
        one = self.layers[0](self.embedding(tokens))
        two = self.layers[1](one)
        three = self.layers[2](two + one.cumsum(1))
        four = self.layers[3](three + self.qkv(two.mean(1, keepdim=True))[..., :DIM])
        return self.head(four + one.flip(1))


class After(Root):
    """The last stage has what follows the blocks alone."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.between(x))


class Pair(nn.Module):
    """Returns its input twice: whole, and two sequences in one dim."""

    def forward(self, x):
        return x, torch.zeros(3), x


def text(table="", more=""):
    pipeline = f'[train]\nmicrobatch = 1\n[scheduling.pipeline]\nschedule = "1F1B"\n{table}'
    return context(mesh="pp = 2", more=pipeline + more)


def split_before(fqn):
    return f'split = {{ tracer = ["{fqn}"] }}\n'


def test_what_the_root_relates_between_blocks_is_that_of_one_device():
    """Received shards carried no mark: the first two, `After` and `Yoco` were silently others, `Skipped` raised."""
    recomputed = '[scheduling.activation_checkpoint]\nmode = "full"\n'
    cases = [
        *((model, text(), padded_batch) for model in (Root, Shifted, Pooled, Yoco, Skipped)),
        (After, text(split_before("qkv")), padded_batch),
        (Root, text('split = "tracer"\n'), padded_batch),
        (Root, text(more=recomputed), padded_batch),
    ]
    for found in run_ranks(sequence_steps, 4, cases):
        for (model, *_), (loss, error, name, _) in zip(cases, found, strict=True):
            assert max(loss, error) <= 1e-12, (model, name)


def test_sequences_in_parts_are_refused_where_a_stage_receives_them():
    model, values = Pair(), StageValues(axis="cp")
    x = mark(torch.zeros(2, LENGTH, DIM), placed=Placed(dim=1, parts=(LENGTH, LENGTH)), degree=2, axis="cp")
    with values.noted(model):
        model(x)
    assert values.returned == {"": [(-1, None, -1)]}
    whole = torch.zeros(3)
    assert values.given(None, "", 5, 1, whole) is whole
    with pytest.raises(PropagationError) as caught:
        values.given(None, "", 0, 0, x.detach())
    assert str(caught.value) == (
        '"" returns several sequences in one dim, which a stage of the pipeline receives; let it return them one by '
        "one, or begin the stage elsewhere ([scheduling.pipeline] split)"
    )


def test_blocks_that_the_dry_run_left_out_return_what_others_of_their_form_do():
    values = StageValues(axis="cp", returned={"layers.0": [(1,)]})
    values.complete([["layers.0", "layers.1"], ["other"]])
    assert values.returned == {"layers.0": [(1,)], "layers.1": [(1,)]}
