"""Code that asks how a sharded sequence lies in memory, or whose number of positions in between depends on values."""

from __future__ import annotations

import pytest
import torch
from support.mixer_models import Causal
from support.models import write_manifest
from support.sequence_models import DIM, LENGTH, VOCAB
from support.sequence_steps import class_loss, context, mine, padded_batch, seeded, sequence_steps
from torch.nn.functional import scaled_dot_product_attention

import composer3d
from composer3d.propagation import PropagatedSequence, PropagationError
from composer3d.testing import run_ranks


class Mixed(Causal):
    """Computes something with all positions before each block."""

    def mixed(self, block, x, tokens):
        return super().mixed(block, self.changed(x, tokens), tokens)


class Identical(Mixed):
    def changed(self, x, tokens):
        return x.as_strided(x.size(), x.stride())


class Overlapping(Mixed):
    """Longformer's chunks, which overlap by half."""

    def changed(self, x, tokens):
        steps = x.stride()
        chunks = x.as_strided((len(x), x.shape[1] // 2 - 1, 4, x.shape[2]), (steps[0], 2 * steps[1], *steps[1:]))
        return x + 0.1 * chunks.sum((1, 2))[:, None]


class Turned(Mixed):
    """What is turned lies otherwise in memory."""

    def changed(self, x, tokens):
        return x + 0.1 * torch.as_strided(x.mT, x.shape, x.mT.stride())


def regulated(x, tokens):
    """Repeat positions as often as tokens say, and take the last of each."""
    repeats = tokens[0] % 3 + 1
    return x.repeat_interleave(repeats, dim=1)[:, repeats.cumsum(0) - 1]


class Regulated(Mixed):
    def changed(self, x, tokens):
        return regulated(x, tokens)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class RegulatedBeforeBlocks(torch.nn.Module):
    """Blocks take what the model computes with another number of positions."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(VOCAB, DIM), torch.nn.Linear(DIM, VOCAB)
        self.position = torch.nn.Embedding(LENGTH, DIM)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = regulated(self.embedding(tokens) + self.position(positions), tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class RegulatedBeforeTheLoss(Causal):
    def forward(self, tokens):
        return regulated(super().forward(tokens), tokens)


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_strides_and_numbers_of_positions_are_those_of_the_whole_sequence(degree):
    cases = [
        (model, context(degree=degree), padded_batch)
        for model in (Identical, Overlapping, Regulated, RegulatedBeforeBlocks)
    ]
    for found in run_ranks(sequence_steps, degree, cases):
        for loss, error, name, _ in found:
            assert max(loss, error) <= 1e-12, name


def test_what_lies_otherwise_is_refused():
    with pytest.raises(composer3d.ComposerError) as caught:
        run_ranks(sequence_steps, 2, [(Turned, context(), padded_batch)])
    assert "of a shard that does not lie densely in memory of its own" in str(caught.value)


def others(model):
    """Run other tokens than the example's, of which every position is repeated once; return the error of the loss."""
    torch.set_default_dtype(torch.float64)
    (tokens,), _, target = padded_batch()
    example = (torch.zeros_like(tokens),), {}
    loss, count = class_loss(seeded(model)(tokens), target)
    with composer3d.compose(seeded(model), write_manifest(context()), loss_fn=class_loss, example=example) as run:
        found = run.forward_backward(mine(run, tokens), target=mine(run, target))
    return abs(float(found) - float(loss.detach() / count))


def test_a_number_of_positions_that_the_dry_run_has_not_met_is_that_of_one_device():
    for error in run_ranks(others, 2, RegulatedBeforeTheLoss):
        assert error <= 1e-12


class Wholes(torch.nn.Module):
    """Gives a block, in place of a shard, as many positions as all ranks have, or another number of them."""

    def __init__(self):
        super().__init__()
        self.block = Seen()

    def forward(self, x, length=None):
        return self.block(x.new_zeros(x.shape[0], length or x.shape[1], x.shape[2]))


class Seen(torch.nn.Module):
    def forward(self, x):
        self.length = x.shape[1]
        return x


class Halves:
    """Rules of which only lengths are asked here."""

    def local_length(self, length):
        return length // 2


def test_a_block_that_takes_shards_is_given_all_positions_as_such():
    model = Wholes()
    taking = PropagatedSequence(degree=2, rules=Halves(), blocks={"block": (1,)}, inputs=lambda args, kwargs: {0: 1})
    taking.install(model)
    for length, seen in ((None, 16), (11, 11)):
        model(torch.ones(2, 8, 4), length)
        assert model.block.length == seen
        model.block(torch.ones(2, seen, 4))  # recomputed in the backward
        assert model.block.length == seen
    model.block(torch.ones(2, 8, 4))  # a shard, as a later stage receives it
    assert model.block.length == 16
    model(torch.ones(2, 8, 4), 8)
    assert model.block.length == 8
    with pytest.raises(PropagationError) as caught:
        model.block(torch.ones(2, 8, 4))
    assert str(caught.value).startswith('"block" is given all 8 positions, of which it takes shards')
