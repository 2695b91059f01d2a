"""Functions that no table of the propagation knows are given whole sequences, whatever their shapes, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.sequence_models import Language
from support.sequence_steps import context, padded_batch, sequence_steps

import composer3d
from composer3d.testing import run_ranks


def _backward(ctx, grad):
    return grad.flip(1)


@torch.library.custom_op("composer3d_tests::backwards", mutates_args=())
def backwards(x: torch.Tensor) -> torch.Tensor:
    """Turn positions round: results have the shape of shards, and are not theirs."""
    return x.flip(1)


backwards.register_fake(torch.empty_like)
backwards.register_autograd(_backward)


class Turned(Language):
    """A custom operator along the sequence."""

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v)

    def mixed(self, block, x, tokens):
        return super().mixed(block, backwards(x), tokens)


class Diagonal(Turned):
    """The diagonal of scores: of rows, a shard has the first columns of it."""

    def mixed(self, block, x, tokens):
        own = torch.diagonal(x @ x.mT, dim1=1, dim2=2)
        return Language.mixed(self, block, x, tokens) * own[..., None]


def test_unknown_functions_are_given_whole_sequences():
    cases = [(model, context(), padded_batch) for model in (Turned, Diagonal)]
    for found in run_ranks(sequence_steps, 2, cases):
        for loss, error, name, _ in found:
            assert max(loss, error) <= 1e-12, name


def test_unknown_functions_are_refused_by_name():
    with pytest.raises(composer3d.ComposerError) as caught:
        run_ranks(sequence_steps, 2, [(Turned, context(more='others = "refuse"\n'), padded_batch)])
    assert 'mixes positions, and others = "refuse" gathers nothing' in str(caught.value)
    assert "backwards" in str(caught.value)
