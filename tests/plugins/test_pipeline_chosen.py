"""Models without one list of equal blocks: where their stages begin is the plugin's choice."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.models import VOCAB, Block, composed, seeded
from support.pipeline_models import DIM, assert_equal_to_one_device, pipelined_step
from torch import nn

from composer3d.testing import run_ranks

ONE = "[mesh]\npp = 2\n[scheduling.pipeline]\n"
TWO = ONE + 'schedule = "Interleaved1F1B"\n'


class Attributes(nn.Module):
    """Karpathy's style: everything in a ModuleDict, read as attributes; the head is the embedding."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCAB, DIM),
                drop=nn.Dropout(0.0),
                h=nn.ModuleList(Block(DIM) for _ in range(4)),
                ln_f=nn.LayerNorm(DIM),
            )
        )
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens):
        x = self.transformer.drop(self.transformer.wte(tokens))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x)) + 0.0


class Decoding(Block):
    def __init__(self):
        super().__init__(DIM)
        self.cross = nn.Linear(DIM, DIM)

    def forward(self, x, memory):
        return super().forward(x + self.cross(memory).mean(1, keepdim=True))


class EncoderDecoder(nn.Module):
    """Two lists of blocks and one embedding, which is the head too."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.ModuleList(Block(DIM) for _ in range(2))
        self.decoder = nn.ModuleList(Decoding() for _ in range(3))

    def forward(self, tokens):
        memory = self.shared(tokens.flip(1))
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(tokens)
        for block in self.decoder:
            x = block(x, memory)
        return x @ self.shared.weight.T


class Skips(nn.Module):
    """Lists of unequal blocks, joined crosswise."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.downs = nn.ModuleList(nn.Linear(DIM * 2**i, DIM * 2 ** (i + 1)) for i in range(2))
        self.middle = nn.Linear(4 * DIM, 4 * DIM)
        self.ups = nn.ModuleList(nn.Linear(DIM * (2 ** (i + 1) + 2**i), DIM * 2**i) for i in (1, 0))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x, kept = self.tok(tokens), []
        for down in self.downs:
            kept.append(x)
            x = torch.tanh(down(x))
        x = torch.tanh(self.middle(x))
        for up in self.ups:
            x = torch.tanh(up(torch.cat([x, kept.pop()], -1)))
        return self.out(x)


class Stage(nn.Module):
    """Blocks, and what makes them wider."""

    def __init__(self, dim, wider, num_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.widen = nn.Linear(dim, wider)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.widen(x)


class Hierarchy(nn.Module):
    """A list of stages, each with a list of blocks; fewer of them than the pipeline has, if it has four."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.stages = nn.ModuleList([Stage(DIM, 2 * DIM, 2), Stage(2 * DIM, 4 * DIM, 3)])
        self.out = nn.Linear(4 * DIM, VOCAB)

    def forward(self, tokens):
        x = self.tok(tokens)
        # Places that do not depend on weights, though what lies there does.
        x = x[torch.arange(x.shape[0]).unsqueeze(1), torch.arange(x.shape[1])]
        for stage in self.stages:
            x = stage(x)
        return self.out(x)


class Pairs(nn.Module):
    """Lists of lists that nobody calls."""

    def __init__(self):
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(nn.ModuleList([Block(DIM), nn.Linear(DIM, DIM)]) for _ in range(3))

    def forward(self, tokens):
        x = self.tok(tokens)
        for mix, feed in self.layers:
            x = mix(x) + x
            x = feed(x) + x
        return self.out(x)


class Experts(nn.Module):
    """A block whose experts are looked for in one of the ways in which people do."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.gate = nn.Linear(DIM, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x):
        flat = x.reshape(-1, DIM)
        weights, chosen = torch.topk(F.softmax(self.gate(flat), -1), 2, dim=-1)
        counts = torch.bincount(chosen.flatten(), minlength=3).tolist() if self.how == "bincount" else None
        y = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            if counts is not None and not counts[index]:
                continue
            if self.how == "item" and (chosen == index).sum().item() == 0:
                continue
            places = (chosen == index).nonzero()
            rows, ranks = places[:, 0], places[:, 1]
            if self.how == "mask":
                mask = (chosen == index).any(-1)
                y[mask] += expert(flat[mask]) * (weights * (chosen == index)).sum(-1)[mask].unsqueeze(-1)
            else:
                y.index_add_(0, rows, expert(flat[rows]) * weights[rows, ranks].unsqueeze(-1))
        return x + y.view_as(x)


class Mixture(nn.Module):
    """Blocks of two kinds, the second of experts."""

    def __init__(self, how):
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([Block(DIM), Experts(how), Experts(how), Experts(how)])

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@pytest.mark.parametrize(
    ("text", "factory", "options"),
    [
        pytest.param(ONE, Attributes, {}, id="attributes"),
        pytest.param(TWO, Attributes, {}, id="attributes-interleaved"),
        pytest.param(ONE, EncoderDecoder, {}, id="encoder-decoder"),
        pytest.param(ONE, Skips, {}, id="skips"),
        pytest.param(TWO, Hierarchy, {}, id="hierarchy-interleaved"),
        pytest.param(ONE, Pairs, {}, id="pairs"),
        pytest.param(ONE, Mixture, {"how": "bincount"}, id="experts-bincount"),
        pytest.param(ONE, Mixture, {"how": "item"}, id="experts-item"),
        pytest.param(TWO, Mixture, {"how": "mask"}, id="experts-mask-interleaved"),
    ],
)
def test_gradients_equal_one_device(text, factory, options):
    assert_equal_to_one_device(run_ranks(partial(pipelined_step, options=options), 2, text, factory))


def rows(text, factory):
    run = composed(text, seeded(factory))
    found = [row for row in run.describe().splitlines() if row.startswith("SPLIT")]
    run.close()
    return found


def test_the_plan_names_where_stages_may_begin():
    (row,), _ = run_ranks(rows, 2, ONE, EncoderDecoder)
    assert row.split(maxsplit=2)[2] == "encoder.0, encoder.1, decoder.0, ... 5 in all"
