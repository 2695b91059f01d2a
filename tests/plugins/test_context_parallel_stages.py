"""Stages of a pipeline whose code between blocks relates positions of what they received, equal to one device's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from composer3d_plugins.sharding.context_parallel.stage_values import StageValues
from support.sequence_models import DIM, HEADS, LENGTH, VOCAB
from support.sequence_steps import context, padded_batch, sequence_steps
from torch import nn

from composer3d.propagation import Placed, PropagationError, mark, spec_of
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
    """Returns its input twice, and what is no sequence."""

    def forward(self, x):
        return x, torch.zeros(3), x


class Lengths:
    """What of a propagated sequence is asked here."""

    local_sizes = frozenset({LENGTH // 2})

    def mark(self, x, dim, *, is_inside):
        assert is_inside
        return mark(x, placed=Placed(dim=dim, parts=(LENGTH,)), degree=2, axis="cp")


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


def returned(parts):
    """Return what is known of a module that returned shards of such parts in the dry run."""
    model, values = Pair(), StageValues(axis="cp", lengths=(LENGTH,))
    x = mark(torch.zeros(2, sum(parts) // 2, DIM), placed=Placed(dim=1, parts=parts), degree=2, axis="cp")
    with values.noted(model):
        model(x)
    return values


def test_what_a_stage_receives_is_marked_as_the_dry_run_found_it():
    values, whole, x = returned((LENGTH,)), torch.zeros(3), torch.zeros(2, LENGTH // 2, DIM)
    assert values.given(Lengths(), "", 5, 1, whole) is whole
    assert spec_of(values.given(Lengths(), "", 5, 2, x), "cp").placed == Placed(dim=1, parts=(LENGTH,))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            (LENGTH, LENGTH),
            '"" returns sequences one after the other in one dim, as rows without padding are, and a stage of the '
            "pipeline receives them; let blocks pass on samples and positions in dims of their own, or begin the stage "
            "elsewhere ([scheduling.pipeline] split)",
        ),
        (
            (LENGTH,),
            '"" returns 7 positions, which is no shard of the batch, and a stage of the pipeline receives them: how '
            "many there are depends on values; choose and put them back in one stage",
        ),
    ],
)
def test_rows_that_values_choose_are_refused_where_a_stage_receives_them(parts, said):
    with pytest.raises(PropagationError) as caught:
        returned(parts).given(Lengths(), "", 0, 0, torch.zeros(2, 7, DIM))
    assert str(caught.value) == said


def test_a_stage_receives_shards_that_another_axis_has_sharded_again():
    values, half = returned((LENGTH,)), torch.zeros(2, LENGTH // 4, DIM)
    with pytest.raises(PropagationError, match="how many there are depends on values"):
        values.given(Lengths(), "", 0, 0, half)
    values.sequence_shards = lambda: 2
    assert spec_of(values.given(Lengths(), "", 0, 0, half), "cp").placed.dim == 1


def test_blocks_that_the_dry_run_left_out_return_what_others_of_their_form_do():
    values = returned((LENGTH,))
    values.returned["layers.0"] = values.returned.pop("")
    values.complete([["layers.0", "layers.1"], ["other"]])
    assert values.returned["layers.1"] == values.returned["layers.0"]
