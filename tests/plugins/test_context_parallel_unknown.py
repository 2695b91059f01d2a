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


class Summed(torch.autograd.Function):
    """Sums of what came before, with a backward of its own: the same with every rank's positions, and wrong of them."""

    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(1).cumsum(1).flip(1)


class Scaled(torch.autograd.Function):
    """The same with every token."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Inner(torch.nn.Module):
    """Applies a function with a backward of its own."""

    def forward(self, x):
        return Summed.apply(x)


def summed(x):
    """Call one through a function."""
    return _named(x)


_named = Summed.apply


class InnerByHelper(torch.nn.Module):
    def forward(self, x):
        return summed(x)


class Rowwise(torch.nn.Module):
    def forward(self, x):
        return Scaled.apply(x)


class Learned(torch.nn.Module):
    """The same with every token, by a parameter: it is not tried on numbers."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Scaled.apply(x) * self.scale


class HasInner(Turned):
    inner_class = Inner

    def __init__(self):
        super().__init__()
        self.inner = self.inner_class()

    def mixed(self, block, x, tokens):
        return Language.mixed(self, block, self.inner(x), tokens)


class HasHelper(HasInner):
    inner_class = InnerByHelper


class HasRowwise(HasInner):
    inner_class = Rowwise


class HasLearned(HasInner):
    inner_class = Learned


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


@pytest.mark.parametrize("model", [HasInner, HasHelper, HasLearned])
def test_backwards_of_a_models_own_are_refused(model):
    with pytest.raises(composer3d.ComposerError) as caught:
        run_ranks(sequence_steps, 2, [(model, context(), padded_batch)])
    name = "Scaled" if model is HasLearned else "Summed"
    said = f'"inner" applies {name}, a torch.autograd.Function: which positions its backward reads cannot be seen; if'
    assert said in str(caught.value)


def test_backwards_of_a_models_own_may_be_rowwise():
    """As the manifest says of a module with parameters; without any it is tried on numbers."""
    rowwise = [(HasLearned, context(more='rowwise = ["inner"]\n'), padded_batch), (HasRowwise, context(), padded_batch)]
    for found in run_ranks(sequence_steps, 2, rowwise):
        for loss, error, *_ in found:
            assert max(loss, error) <= 1e-12
